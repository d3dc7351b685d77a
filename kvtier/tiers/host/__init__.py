"""The host tier: slots in slabs of memory, pins, and which block is evicted."""
