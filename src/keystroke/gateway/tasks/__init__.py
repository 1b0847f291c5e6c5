"""Tasks of the server: each runs on a thread of its own and uses the server's models through their queues."""
