"""`kvtier stats`: what an engine and a pool say of themselves, in words an operator asks in."""
