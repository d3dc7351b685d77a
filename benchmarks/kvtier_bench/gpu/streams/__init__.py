"""How long loads and saves take beside a busy engine, in virtual time: the real mover and copies on a simulated GPU.

`reserved` has memory of full size that nobody touches, `pace` the speed of a bus, `worker` an engine that queues steps
ahead, and `cases` what is asked of it.
"""
