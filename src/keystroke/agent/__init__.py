"""Tasks done by models: few tools, a sandbox, several attempts at once, and how well that scores."""
