"""Tasks as a server does them: each on a thread of its own, its models in the server's queues."""
