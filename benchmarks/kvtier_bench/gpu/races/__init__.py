"""Races between an engine that never idles and the copies beside it: found by what the KV holds afterwards.

`engine` queues steps ahead, `scenarios` has what goes wrong in the field, `faults` plants it, and `chip` is a GPU or a
simulated one.
"""
