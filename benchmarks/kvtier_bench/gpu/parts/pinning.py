"""What it takes to get host memory ready for copies: first touch and pinning, and how launches fare meanwhile."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch

from kvtier.clock import MONOTONIC
from kvtier.device.kv import Blocks, DeviceKV
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory
from kvtier_bench.gpu.measuring.comparing import WrongResultError, require_equal
from kvtier_bench.gpu.measuring.host_copies import lends, map_to_lend, not_lent, require_pinned
from kvtier_bench.gpu.measuring.launch_latency import Launches, during, launching_elsewhere, launching_here
from kvtier_bench.gpu.measuring.layouts import DeviceBlocks, Layout, mover_of
from kvtier_bench.gpu.measuring.rows import failure, row
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.measuring.timing import note
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples

_BLOCK_BYTES, _TINY_BLOCK_BYTES = 2 << 20, 4096
_ROUNDS = 3
_LONGEST_S = 8.0
"""The longest time that one round takes. Rows come when all is over, since launches elsewhere are known then."""
_BLOCKS = [0, 1, 2, 3]


def measure(setting: Setting) -> Iterator[Case]:
    """4 GiB of each kind of memory, by what engines pin it with; launches of this process and of another one beside."""
    layout = Layout("contiguous blocks", 1, setting.size(_BLOCK_BYTES, _TINY_BLOCK_BYTES))
    blocks, num_slots = DeviceBlocks(setting, layout, len(_BLOCKS)), setting.size(2048, 4)
    with_lent, wrong = lends(setting), ""
    with mover_of(setting, blocks) as device, launching_elsewhere(tiny=setting.tiny) as elsewhere:
        memory = _Memory(setting, blocks, device, with_lent=with_lent)
        with launching_here(setting) as here:
            memory.leave_alone(setting.size(500, 10) / 1e3)
            try:
                for number in range(2 * setting.size(_ROUNDS, 1)):
                    if number < 2 or setting.left_s() > _LONGEST_S:
                        memory.one_round(num_slots, is_shared=number % 2 == 0)
            except WrongResultError as error:  # what was measured before is told all the same
                wrong = str(error)
    nbytes = num_slots * layout.block_bytes
    op = f"{nbytes / 2**30:,.1f} GiB of host memory"
    if not with_lent:
        yield not_lent(op)
    if wrong:
        yield failure("results", op, wrong)
    for name, of in memory.took.items():
        yield row(name, op, of, round_bytes=nbytes)
    for place, launches in (("this process", here), ("another process", elsewhere)):
        yield from _latencies(place, launches, memory.windows)


class _Memory:
    """Memory that is touched, pinned, copied from, unpinned and given back, again and again. One thread."""

    def __init__(self, setting: Setting, blocks: DeviceBlocks, device: DeviceKV, *, with_lent: bool) -> None:
        """:param with_lent: whether memory that is mapped for reading takes part."""
        self._setting, self._blocks, self._device, self._with_lent = setting, blocks, device, with_lent
        self.took: Mapping[str, Samples] = defaultdict(Samples)
        """The samples of each operation, by what was done with which kind of memory."""
        self.windows: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """The begin and end of each operation by the monotonic clock, under the same names."""

    def leave_alone(self, seconds: float) -> None:
        """Does nothing: what launches take otherwise."""
        begin_s = MONOTONIC()
        time.sleep(seconds)
        self.windows["nothing else goes on"].append((begin_s, MONOTONIC()))

    def one_round(self, num_slots: int, *, is_shared: bool) -> None:
        """
        :raises WrongResultError: memory cannot be pinned, or what is copied from it does not arrive.
        """
        kind, begin_s = "memfd" if is_shared else "anonymous", MONOTONIC()
        arena = Arena(num_slots, self._blocks.layout.block_bytes, shared=is_shared)
        self._note(f"{kind}, touched first", begin_s)
        try:
            torch.from_numpy(arena.rows[: len(_BLOCKS)]).random_(0, 256)
            self._pin(kind, arena)
            require_pinned(self._setting, arena)
            self._copy_and_unpin(kind, arena)
            if is_shared and self._with_lent:
                lent = map_to_lend(arena)
                self._pin("mapped for reading", lent)
                self._copy_and_unpin("mapped for reading", lent)
        finally:
            arena.close()

    def _pin(self, kind: str, memory: SlotMemory) -> None:
        begin_s = MONOTONIC()
        if not self._device.attach(memory):
            raise WrongResultError(f"memory ({kind}) could not be pinned")
        self._note(f"{kind}, pinned", begin_s)

    def _copy_and_unpin(self, kind: str, memory: SlotMemory) -> None:
        self._blocks.poison()
        self._device.scatter_all([Blocks(memory, _BLOCKS, _BLOCKS)], after=self._device.fence())
        expected = torch.tensor(memory.rows[: len(_BLOCKS)])
        begin_s = MONOTONIC()
        self._device.detach(memory)
        self._note(f"{kind}, unpinned", begin_s)
        require_equal(f"blocks from memory ({kind})", self._blocks.rows(_BLOCKS), expected)

    def _note(self, name: str, begin_s: float) -> None:
        end_s = MONOTONIC()
        note(self.took[name], end_s - begin_s)
        self.windows[name].append((begin_s, end_s))


def _latencies(place: str, launches: Launches, windows: Mapping[str, list[tuple[float, float]]]) -> Iterator[Case]:
    """A case for the launches that were under way in each kind of window."""
    for name, ofs in windows.items():
        seconds = [took_s for begin_s, end_s in ofs for took_s in during(launches, begin_s, end_s)]
        if seconds:
            figures = {"longest launch, ms": 1e3 * max(seconds), "launches": float(len(seconds))}
            op = f"a small launch and its end, in {place}"
            yield row(f"while {name}", op, Samples(seconds, seconds), figures=figures)
