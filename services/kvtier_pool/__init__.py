"""The cache pool: a service that keeps blocks of KV for all engines of a site, in memory and on disk.

`core` has all verbs, `server` and `http` are thin adapters over it, `cli` is `kvtier pool`.
"""
