"""The command `kvtier`."""
