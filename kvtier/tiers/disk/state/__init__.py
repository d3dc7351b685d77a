"""What a disk tier knows in memory: its index, its segments, and writes under way."""
