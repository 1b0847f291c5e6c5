"""One unit of work from its admission to its receipt: routing, priority, queue, engine."""
