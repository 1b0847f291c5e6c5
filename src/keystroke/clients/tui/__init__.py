"""The terminal user interface: chat and tasks on one screen, over a gateway."""
