"""Memory of C and C++: capacities, lifetimes, pointers and bounds."""
