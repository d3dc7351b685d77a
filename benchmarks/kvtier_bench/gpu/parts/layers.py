"""A forward pass over a prefix in pinned host memory: after all of it has come, and while it comes layer by layer.

The engine loads between steps and computes when everything is there. What it would gain by the other way is measured
here with its model, its paged KV and what moves its blocks, without its scheduler.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from kvtier.device.kv import Blocks, DeviceKV
from kvtier.memory.arena import Arena
from kvtier_bench.gpu.measuring.comparing import require_close_logits, require_equal
from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.layouts import moved_by
from kvtier_bench.gpu.measuring.models import model_of
from kvtier_bench.gpu.measuring.rows import median_s, row
from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.gpu.measuring.timing import DeviceClock, in_turns
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples
from kvtier_engine.model.arriving_kv import ArrivingKV
from kvtier_engine.model.devices import layered_loads
from kvtier_engine.model.llama import Chunk
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv

_TOKENS_PER_BLOCK = 16
_WHOLE, _BY_LAYER = "load, then compute", "layer by layer"
_PATIENCE_S = 30.0
_NO_NUMBER = 0xFF
"""The byte that fills memory with NaN, whatever the size of its floats."""


def measure(setting: Setting) -> Iterator[Case]:
    """64 and 2,048 new tokens after 16,384, whose 1,024 blocks lie anywhere on the device. By the wall.

    Both ways must first give the logits of a prefix that has never left, and its bytes, these bit for bit.
    """
    model, config = model_of(setting)
    cached, lengths = setting.size(16_384, 64), (setting.size(64, 8), setting.size(2048, 24))
    num_cached, num_new = cached // _TOKENS_PER_BLOCK, -(-max(lengths) // _TOKENS_PER_BLOCK)
    kv = allocate_kv(config, num_cached + num_new, _TOKENS_PER_BLOCK, setting.dtype, setting.device)
    kv.tensor.normal_()
    table = torch.randperm(kv.num_blocks).tolist()
    arena = Arena(num_cached, kv.block_bytes)
    with (
        contextlib.closing(arena),
        moved_by(setting, [[kv.byte_rows()]]) as mover,
        contextlib.closing(_Prefix(setting, kv, table[:num_cached], arena, mover)) as prefix,
    ):
        cases: dict[str, Callable[[], Iterator[Case]]] = {}
        for length in lengths:
            chunk = Chunk(torch.randint(config.vocab_size, (length,)).tolist(), cached, table)
            op = f"{length:,} new tokens after {cached:,}"
            cases[op] = partial(_measured, setting, op, prefix, partial(model.forward, [chunk]))
        yield from each(setting, cases)


def _measured(setting: Setting, op: str, prefix: "_Prefix", forward: Callable[[PagedKV], Tensor]) -> Iterator[Case]:
    yield from _rows(op, _timed(setting, prefix, forward), prefix.nbytes)


def _timed(setting: Setting, prefix: "_Prefix", forward: Callable[[PagedKV], Tensor]) -> dict[str, Samples]:
    """Loading alone, computing alone, and both, in turns."""

    def load_then_compute() -> Tensor:
        prefix.load()
        return forward(prefix.kv)

    def layer_by_layer() -> Tensor:
        return forward(prefix.load_by_layer())

    ways = {_WHOLE: load_then_compute, _BY_LAYER: layer_by_layer}
    prefix.require_alike(forward(prefix.kv), ways)
    subjects: dict[str, Run] = {
        "load": prefix.load,
        "load by layer": prefix.load_all_layers,
        "compute": lambda: forward(prefix.kv),
        **ways,
    }
    return in_turns(subjects, setting, DeviceClock(setting).wall_s)


def _rows(op: str, samples: Mapping[str, Samples], nbytes: int) -> Iterator[Case]:
    longer_s = max(median_s(samples["load"]), median_s(samples["compute"]))
    for name, of in samples.items():
        both = name in (_WHOLE, _BY_LAYER)
        yield row(
            name,
            op,
            of,
            floor=(_WHOLE, samples[_WHOLE]),
            figures={"x the longer of load and compute": median_s(of) / longer_s} if both else {},
            round_bytes=nbytes if name.startswith("load") and not both else 0,
        )


class _Prefix:
    """Blocks of KV that are in an arena, and the ways in which they come to the device. One thread."""

    def __init__(self, setting: Setting, kv: PagedKV, blocks: Sequence[int], arena: Arena, mover: DeviceKV) -> None:
        """Copies them to the arena's slots, in this order.

        :param mover: of `kv`; it pins the arena.
        """
        self._setting, self.kv, self._arena, self._mover = setting, kv, arena, mover
        self._blocks, self._slots = list(blocks), list(range(len(blocks)))
        self.nbytes = len(blocks) * kv.block_bytes
        mover.gather(self._blocks, arena, self._slots, after=mover.fence())
        self._pinned = torch.from_numpy(arena.rows)
        self._layered = layered_loads(mover, kv)
        self._executor = ThreadPoolExecutor(1, "kvtier-bench-layers")
        self._under_way: Future[None] | None = None
        """The load of the last call of `load_by_layer`, until it was waited for."""

    def load(self) -> None:
        """Loads by what the engine loads with: everything is there on return."""
        self._mover.scatter(self._arena, self._slots, self._blocks, after=self._mover.fence())

    def load_by_layer(self) -> PagedKV:
        """Begins as a mover does, in a thread of its own. The KV to compute with meanwhile, on the current stream.

        A device without a queue has loaded all of it on return.
        """
        if self._layered is None:
            self.load()
            return self.kv
        self._wait_for_load()
        queued, blocks = threading.Event(), Blocks(self._arena, self._slots, self._blocks)
        fence = self._mover.fence()
        self._under_way = self._executor.submit(self._layered.scatter, blocks, after=fence, on_queued=queued.set)
        if not queued.wait(_PATIENCE_S):
            self._under_way.result()  # raises what kept it
        return ArrivingKV(self.kv.tensor, self._layered)

    def load_all_layers(self) -> None:
        """Loads by layer; everything is there on return."""
        self.load_by_layer()
        self._wait_for_load()

    def require_alike(self, expected: Tensor, ways: Mapping[str, Callable[[], Tensor]]) -> None:
        """Each of them gives the logits `expected`, and leaves on the device what is in the arena.

        :raises WrongResultError: one does not.
        """
        for name, run in ways.items():
            rows = self.kv.byte_rows()
            rows[self._blocks] = _NO_NUMBER
            logits = run()
            # Not bit for bit: libraries may choose another way beside another stream. What is missing is no number.
            require_close_logits(f"{name}: logits", logits, expected, self._setting.dtype)
            self._wait_for_load()
            require_equal(f"{name}: blocks on the device", rows[self._blocks], self._pinned)

    def _wait_for_load(self) -> None:
        load, self._under_way = self._under_way, None
        if load is not None:
            load.result()

    def close(self) -> None:
        """Ends the thread."""
        self._wait_for_load()
        self._executor.shutdown()
