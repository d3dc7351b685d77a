"""What a launcher would launch on a GPU: recorded on CPU tensors, and compiled for a chip that is not here.

Needs triton, but no GPU and no driver. Not in a process with TRITON_INTERPRET=1.
"""

import contextlib
import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction, mangle_type

import kvtier_kernels as package
from kvtier_bench.gpu.resources.candidates import label
from kvtier_bench.gpu.resources.occupancy import programs_per_multiprocessor
from kvtier_kernels.tiles import Tile

_PREFIX = f"{package.__name__}."
SHARED_LIMIT_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""What one block may have, by compute capability (CUDA C++ programming guide, technical specifications)."""
_PRODUCTS = {"mma": r"\bmma\.sync", "wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma\."}
OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its grid, and all that was passed by name or by position."""

    kernel: JITFunction[Any]
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """The kernel's, as its module has it."""
        return str(self.kernel.__name__)

    @property
    def tile(self) -> Tile:
        """The tile of an attention kernel."""
        arguments, options = self.arguments, self.options
        return Tile(arguments["ROWS"], arguments["KEYS"], options["num_warps"], options["num_stages"])


@dataclass
class Recorder:
    """Stands in for a kernel. Launchers take it for an interpreted one, so that it may be given CPU tensors."""

    kernel: JITFunction[Any]
    launches: list[Launch] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
            arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            assert arguments.keys() == set(self.kernel.arg_names)
            self.launches.append(Launch(self.kernel, grid, arguments, options))

        return launch


def kernels_of(module: ModuleType) -> dict[str, JITFunction[Any]]:
    """The kernels that a module launches, by the names that it has for them."""
    named = vars(module).items()
    return {name: value for name, value in named if isinstance(value, JITFunction) and name.endswith("_kernel")}


def kernel_modules() -> list[ModuleType]:
    """The modules of `kvtier_kernels` that have kernels."""
    modules = (importlib.import_module(found.name) for found in pkgutil.walk_packages(package.__path__, _PREFIX))
    return [module for module in modules if kernels_of(module)]


@contextlib.contextmanager
def recorded(modules: ModuleType | Sequence[ModuleType], capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """Launches of the modules' kernels are recorded, in order, as on a chip of this capability; none runs."""
    launches: list[Launch] = []
    with contextlib.ExitStack() as patched:
        for module in [modules] if isinstance(modules, ModuleType) else modules:
            for name, kernel in kernels_of(module).items():
                patched.enter_context(mock.patch.object(module, name, Recorder(kernel, launches)))
            if hasattr(module, "capability"):
                patched.enter_context(mock.patch.object(module, "capability", return_value=capability))
        yield launches


def compile_launch(launch: Launch, capability: int) -> CompiledKernel:
    """The kernel as Triton would compile it for these arguments: the same types, alignments and constants.

    :param capability: e.g. 90 for sm_90.
    """
    signature, constants, attributes = {}, {}, {}
    for index, param in enumerate(launch.kernel.params):
        value = launch.arguments[param.name]
        free = not param.do_not_specialize
        if param.is_constexpr or value is None or (free and type(value) is int and value == 1):
            signature[param.name], constants[(index,)] = "constexpr", value
            continue
        signature[param.name] = mangle_type(value)
        address = value.data_ptr() if isinstance(value, torch.Tensor) else value if type(value) is int else 1
        if free and address % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))


@dataclass(frozen=True)
class Usage:
    """What the machine code takes per thread."""

    registers: int
    stack_bytes: int
    """Registers that did not fit are spilled to the stack; nothing else of ours is there."""
    local_bytes: int

    @property
    def spilled_bytes(self) -> int:
        return self.stack_bytes + self.local_bytes


def usage_of(compiled: CompiledKernel, folder: Path | None = None) -> Usage:
    """Read off the machine code with the cuobjdump of triton's wheel.

    :param folder: where to put the machine code; one of its own when None.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", answer)}
    return Usage(numbers["REG"], numbers["STACK"], numbers["LOCAL"])


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes."""

    kernel: str
    configuration: str
    tile: str
    """The tile of an attention kernel, as `candidates.label` writes it; empty for other kernels."""
    default: bool
    chip: int
    """Compute capability, e.g. 90."""
    registers: int
    """The number of registers that a thread takes."""
    spilled_bytes: int
    """The number of bytes that a thread spills."""
    shared_bytes: int
    """The shared memory that a program takes."""
    shared_limit_bytes: int
    products: str
    """Instructions of the tensor cores in the kernel, e.g. `32 wgmma`; empty where there are none."""
    num_warps: int
    programs_per_multiprocessor: int
    """The number of programs that run at a time on a multiprocessor."""

    @property
    def is_too_much(self) -> bool:
        """Whether the kernel takes too many registers or too much shared memory."""
        return self.spilled_bytes > 0 or self.shared_bytes > self.shared_limit_bytes


def resources_of(launch: Launch, chip: int, configuration: str, *, default: bool) -> Resources:
    """Compiles it for this chip.

    :param configuration: what to call the launch. `default`: its launcher chose the tile.
    """
    kernel = compile_launch(launch, chip)
    usage, metadata = usage_of(kernel), kernel.metadata
    programs = programs_per_multiprocessor(
        chip,
        registers=usage.registers,
        num_warps=metadata.num_warps,
        shared_bytes=metadata.shared,
        tensor_columns=getattr(metadata, "tmem_size", 0) or 0,
    )
    return Resources(
        kernel=launch.name,
        configuration=configuration,
        tile=label(launch.tile) if {"ROWS", "KEYS"} <= launch.arguments.keys() else "",
        default=default,
        chip=chip,
        registers=usage.registers,
        spilled_bytes=usage.spilled_bytes,
        shared_bytes=metadata.shared,
        shared_limit_bytes=SHARED_LIMIT_BYTES[chip],
        products=_products(kernel.asm["ptx"]),
        num_warps=metadata.num_warps,
        programs_per_multiprocessor=programs,
    )


def _products(ptx: str) -> str:
    """The products in this PTX, by name. Each is one instruction of the machine code as well."""
    counts = {name: len(re.findall(pattern, ptx)) for name, pattern in _PRODUCTS.items()}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)
