"""What the kernels are worth on a GPU: checks, tuning and measurements in one run, and what they take of any chip.

Apart from `kvtier_kernels`, which needs torch and triton alone: measuring time to first token takes the engine and the
pool too. Modules that need torch are not imported here. `docs/gpu.md` says how it is run.
"""
