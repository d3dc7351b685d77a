"""How many programs of a kernel a multiprocessor holds at a time: by registers, threads, shared and tensor memory."""

from dataclasses import dataclass

_REGISTERS = 65_536
_REGISTERS_AT_A_TIME = 256
"""A warp gets a multiple of so many."""
_SYSTEM_SHARED_BYTES = 1024
"""The shared memory that every program takes beside its own."""
_TENSOR_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What differs between chips (CUDA C++ programming guide, technical specifications per compute capability)."""

    shared_bytes: int
    max_warps: int
    max_programs: int


MULTIPROCESSORS = {
    80: Multiprocessor(164 * 1024, 64, 32),
    86: Multiprocessor(100 * 1024, 48, 16),
    89: Multiprocessor(100 * 1024, 48, 24),
    90: Multiprocessor(228 * 1024, 64, 32),
    100: Multiprocessor(228 * 1024, 64, 32),
    120: Multiprocessor(100 * 1024, 48, 24),
}
"""The resources of a multiprocessor, by compute capability."""


def programs_per_multiprocessor(
    chip: int, *, registers: int, num_warps: int, shared_bytes: int, tensor_columns: int = 0
) -> int:
    """0 where not even one fits.

    :param chip: compute capability, e.g. 90. `registers`: of a thread. `shared_bytes`: that the launch asks for.
    :param tensor_columns: of tensor memory, where the chip has it.
    """
    has = MULTIPROCESSORS[chip]
    warp_registers = -(-registers * 32 // _REGISTERS_AT_A_TIME) * _REGISTERS_AT_A_TIME
    bounds = [
        _REGISTERS // warp_registers // num_warps,
        has.shared_bytes // (shared_bytes + _SYSTEM_SHARED_BYTES),
        has.max_warps // num_warps,
        has.max_programs,
    ]
    if tensor_columns:
        bounds.append(_TENSOR_COLUMNS // tensor_columns)
    return min(bounds)
