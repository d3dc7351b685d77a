"""What kernels take of chips that are not here, compiled ahead of time."""
