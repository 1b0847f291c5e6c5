"""C's and C++'s memory: capacities, lifetimes, pointers and the bounds that tests give."""
