"""`python -m keystroke` is `keystroke`."""

from keystroke.clients.cli import main

main()
