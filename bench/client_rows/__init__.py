"""Parts of `bench.clients`: the tasks, and the programs that do them."""
