"""The terminal interface: chat and tasks on one screen, over a gateway."""
