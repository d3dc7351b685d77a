"""Strategies that choose the engine of a request: plain objects without I/O, threads or a clock of their own."""
