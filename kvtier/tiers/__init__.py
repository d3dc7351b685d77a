"""Levels of storage behind one protocol (`base`): host memory, local disk, the cache pool."""
