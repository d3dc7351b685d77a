"""A run of all parts, each in a process of its own."""
