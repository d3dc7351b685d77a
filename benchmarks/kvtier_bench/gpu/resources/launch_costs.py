"""`python -m kvtier_bench.gpu.resources.launch_costs`: what the host takes to write and attend in a
layer, launches aside.

Kernels are replaced by nothing, so that only our Python is timed: on CPU tensors, without a GPU. Triton's own part of a
launch and torch's calls into CUDA come on top.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kvtier_bench.gpu.measuring.shapes import LLAMA_8B
from kvtier_bench.gpu.resources.compiling import kernel_modules, kernels_of
from kvtier_bench.measuring.report import Case, report
from kvtier_bench.measuring.rounds import Subject, in_turn
from kvtier_kernels import AttentionBatch, SharedPrefixes
from kvtier_kernels.arguments import check_write
from kvtier_kernels.attention.layer_attention import step_with_triton
from kvtier_kernels.attention.paged_attention import attend_with_triton
from kvtier_kernels.writes.slot_write import write_slots

_NUM_SEQS, _NUM_KEYS, _TOKENS_PER_BLOCK = 16, 4000, 16
_CHECKED, _PLANNED = "every call by itself", "planned once per step"


class _Nothing:
    """Stands in for a kernel. Launchers take it for an interpreted one, so that it may be given CPU tensors."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        pass


def _look_at_nothing(*_: object) -> None:
    pass


def _of_an_h200(_device: torch.device) -> int:
    return 132


@contextlib.contextmanager
def _no_kernels() -> Iterator[None]:
    """Launches do nothing, and what is looked at on CPU alone is not looked at."""
    with contextlib.ExitStack() as patched:
        for module in kernel_modules():
            for name in kernels_of(module):
                patched.enter_context(mock.patch.object(module, name, _Nothing()))
            if hasattr(module, "check_block_ids"):
                patched.enter_context(mock.patch.object(module, "check_block_ids", _look_at_nothing))
            if hasattr(module, "num_multiprocessors"):
                patched.enter_context(mock.patch.object(module, "num_multiprocessors", _of_an_h200))
        yield


def cases(calls: int) -> Iterator[Case]:
    """A row for each way of each kind of batch, a round being so many calls."""
    tables = torch.arange(_NUM_SEQS * 256).view(_NUM_SEQS, 256)
    lens = torch.full((_NUM_SEQS,), _NUM_KEYS)
    prefixes = SharedPrefixes.of(tables[:1].repeat(_NUM_SEQS, 1), lens, _TOKENS_PER_BLOCK)
    batches = {
        f"decode of {_NUM_SEQS} sequences": (1, None),
        f"decode of {_NUM_SEQS} sequences that share blocks": (1, prefixes),
        f"prefill of 4 tokens of {_NUM_SEQS} sequences": (4, None),
    }
    with _no_kernels():
        for op, (new, shared) in batches.items():
            starts = torch.arange(0, _NUM_SEQS * new + 1, new)
            subjects = _subjects(tables, starts, lens, shared)
            samples = in_turn({name: Subject(_round(run, calls)) for name, run in subjects.items()}, label=op)
            for name, of in samples.items():
                yield Case.of(name, op, of, floor=(_CHECKED, samples[_CHECKED]), unit="layer")


def _subjects(
    tables: Tensor, starts: Tensor, lens: Tensor, prefixes: SharedPrefixes | None
) -> dict[str, Callable[[], object]]:
    """One layer, checked in full, and as a layer behind the first one of a step."""
    heads, kv_heads, head_dim = LLAMA_8B.num_heads, LLAMA_8B.num_kv_heads, LLAMA_8B.head_dim
    kv_layer = torch.empty((64, 2, _TOKENS_PER_BLOCK, kv_heads, head_dim), dtype=torch.bfloat16)
    rows = torch.empty((int(starts[-1]), heads + 2 * kv_heads, head_dim), dtype=torch.bfloat16)
    query, key, value = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
    places = torch.zeros(len(rows), dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64)
    batch = AttentionBatch(
        tables, starts, lens,
        scale=LLAMA_8B.scale, max_seq_len=_NUM_KEYS, num_keys=_NUM_SEQS * _NUM_KEYS, prefixes=prefixes,
    )  # fmt: skip

    def checked() -> None:
        check_write(kv_layer, key, value, *places)
        write_slots(kv_layer, key, value, *places)
        attend_with_triton(query, kv_layer, batch)

    step = step_with_triton(places, batch)
    return {_CHECKED: checked, _PLANNED: lambda: step(kv_layer, query, key, value)}


def _round(run: Callable[[], object], calls: int) -> Callable[[], list[float]]:
    def seconds() -> list[float]:
        taken = []
        for _ in range(calls):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
        return taken

    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_bench.gpu.resources.launch_costs", description=__doc__)
    parser.add_argument("--calls", type=int, default=1000, help="in each of nine rounds (1000)")
    parser.add_argument("--json", action="store_true", help="print JSON, with the table on standard error")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report("What the host takes for one layer", list(cases(options.calls)), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
