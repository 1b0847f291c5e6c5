"""Programs that people and editors use: connections to a gateway, the command line, LSP, ACP and the TUI."""
