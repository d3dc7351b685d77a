"""Which blocks were asked for, when and by whom: recorded, read from files, and held in memory. No tokens."""
