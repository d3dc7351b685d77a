"""The cache pool's memory, mapped by a client on the same host."""
