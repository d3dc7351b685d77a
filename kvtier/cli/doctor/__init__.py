"""`kvtier doctor`: why a set-up does not work, or works less well than it could, and what to do about it."""
