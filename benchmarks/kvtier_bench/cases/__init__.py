"""Cases of `kvtier bench`."""
