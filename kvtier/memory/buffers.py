"""Types of the memory that blocks are copied from and to."""

import numpy as np
import numpy.typing as npt

ReadableBuffer = bytes | bytearray | memoryview
"""C-contiguous bytes. Memoryviews are one-dimensional of format 'B'."""
Bytes2D = npt.NDArray[np.uint8]
"""`[rows, bytes]`, uint8; each row is contiguous."""
