"""Rules as data and how they are held against what the data flow sees, with their fixes."""
