"""Which block goes first when room is needed, and which block a slower tier takes at all."""
