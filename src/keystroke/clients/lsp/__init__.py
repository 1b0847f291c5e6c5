"""`keystroke lsp`: the live channel for editors that speak the Language Server Protocol."""
