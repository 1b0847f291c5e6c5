"""The wire as values: requests, events, their codec and the sans-I/O session. No sockets here."""
