"""An engine with its KV, host memory and mover on one chip, and what scenarios do with it."""

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.device.cuda import CudaKV
from kvtier.errors import KvtierError
from kvtier.identity.keys import NamespaceId
from kvtier.memory.arena import Arena
from kvtier.offload import OTHER_COPIES, InventoryLog, Mover, MoverTiers
from kvtier.offload.messages import LoadBatch, SaveBatch
from kvtier_bench.gpu.races.chip import Chip
from kvtier_bench.gpu.races.engine import Engine, key_of
from kvtier_bench.gpu.races.faults import Fault, FaultyCuda, FaultyKV, FaultyLoads, layered_loads, share_staging
from kvtier_bench.gpu.races.lender import POOL, Lender
from kvtier_bench.gpu.races.pages import Pages
from kvtier_bench.gpu.races.work import Queues, Work

_MOST_STEPS = 10_000
_LOAD_THREADS = 2
_NUM_LAYERS = 4
"""How many a block of one part has."""
_NUM_LANES = _LOAD_THREADS + OTHER_COPIES
"""Every thread of the mover that copies has one."""


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of KV, and how many blocks of it there are."""

    part_bytes: int
    parts: tuple[int, ...]
    """How many parts a block has, one per layer, by KV group. The first group has the most."""
    num_blocks: int = 24
    num_slots: int = 24
    staged_blocks: int = 3
    """Blocks in a staging buffer: fewer than a batch has, so that it is used several times for one."""

    @property
    def block_bytes(self) -> int:
        """The size of a block in the arena."""
        return self.part_bytes * self.parts[0]

    @property
    def batch(self) -> int:
        """How many blocks a round moves at a time."""
        return self.num_blocks // 4


TINY = Size(part_bytes=64, parts=(2, 1))
LARGE_PAGES = Size(part_bytes=64 << 10, parts=(16, 10), num_blocks=192, num_slots=192, staged_blocks=5)
"""Blocks of 1 MiB in pages like those of an 8B model in vLLM, which are copied straight to host memory."""
SMALL_PAGES = Size(part_bytes=8 << 10, parts=(80, 50), num_blocks=192, num_slots=192, staged_blocks=5)
"""Blocks of 640 KiB in pages like those of a rank of a 70B model on eight, which go by way of a staging buffer."""


class Rig:
    """Everything that a scenario works with. One thread."""

    def __init__(
        self,
        chip: Chip,
        pages: Pages,
        engine: Engine,
        lender: Lender,
        size: Size,
        numbers: random.Random,
        layered: FaultyLoads | None,
    ) -> None:
        """:param layered: loads by layer, where blocks have one part and no staging."""
        self.chip, self.pages, self.engine, self.layered = chip, pages, engine, layered
        self.work, self.numbers = Work(chip, pages), numbers
        self._lender, self._size = lender, size
        self.streams = [chip.cuda.Stream(chip.device) for _ in range(3)]
        self._free_blocks = list(range(size.num_blocks * len(size.parts)))
        self._free_slots = list(range(size.num_slots))
        self._places = itertools.cycle(range(size.num_slots))
        self.num_restored = 0

    def blocks(self) -> list[int]:
        """A batch of device slots. Slots that were given back last come first, so they are in use again at once."""
        return _some(self._free_blocks, self._size.batch, self.numbers)

    def slots(self) -> list[int]:
        """A batch of arena slots."""
        return _some(self._free_slots, self._size.batch, self.numbers)

    def give_back(self, *, blocks: Sequence[int] = (), slots: Sequence[int] = ()) -> None:
        """Gives device slots and arena slots back for further use."""
        self._free_blocks += blocks
        self._free_slots += slots

    def lend(self, contents: Sequence[int], instead_of: Sequence[bytes] = ()) -> list[bytes]:
        """Puts new blocks into the pool and gives their keys. Blocks beyond `instead_of` get places in turn.

        :param instead_of: keys of as many or fewer blocks, whose places the first ones get.
        """
        keys, payloads = [key_of(content) for content in contents], map(self.pages.payload, contents)
        for key, payload, former in itertools.zip_longest(keys, payloads, instead_of):
            place = self._lender.place_of(former) if former is not None else next(self._places)
            self._lender.put(key, place, payload)
        return keys

    def until_over(self, batch: SaveBatch | LoadBatch) -> bytes | None:
        """Queues steps until the mover keeps off the batch's blocks. Gives `Engine.result`."""
        for _ in range(_MOST_STEPS):
            if self.engine.is_over(batch):
                return self.engine.result(batch)
            self.engine.step(self.work.hold_up(0.001 * self.numbers.random()))
        raise KvtierError(f"after {_MOST_STEPS} steps, a batch is not over")

    def save(self, blocks: Sequence[int], slots: Sequence[int], *work: Queues) -> SaveBatch:
        """Queues a step that computes the blocks, and saves them behind it."""
        save = self.engine.save(blocks, slots)
        self.engine.step(*work, takes=blocks, messages=[save])
        return save

    def restore(self, number: int, slots: Sequence[int], contents: Sequence[int], *first: Queues) -> None:
        """Loads blocks to other device slots, to which `first` is done before, and compares them."""
        blocks = self.blocks()
        self.restore_into(number, blocks, slots, contents, *first)
        self.give_back(blocks=blocks)

    def restore_into(
        self, number: int, blocks: Sequence[int], slots: Sequence[int], contents: Sequence[int], *first: Queues
    ) -> None:
        """Loads blocks to these device slots, to which `first` is done before, and compares them."""
        load = self.engine.load(slots, blocks)
        self.engine.step(self.work.hold_up(0.002 * self.numbers.random()), takes=blocks, first=first, messages=[load])
        self.compare(number, load, contents)

    def compare(self, number: int, load: LoadBatch, contents: Sequence[int]) -> None:
        """Compares what a load has brought in the next step after its end."""
        ok = self.until_over(load)
        if not ok or not all(ok):
            raise KvtierError(f"a load has failed: {ok!r}")
        self.num_restored += len(contents)
        self.engine.step(self.work.check(number, load.device_slots, contents))


@contextlib.contextmanager
def rig(chip: Chip, size: Size, *, rounds: int, fault: Fault, seed: int) -> Iterator[Rig]:
    """A rig for the calling thread, with parts like those that `kvtier.build.engine_cache` makes."""
    numbers = random.Random(seed)
    pages = Pages(chip.device, num_blocks=size.num_blocks, part_bytes=size.part_bytes, parts=size.parts, rounds=rounds)
    staging_bytes = _NUM_LANES * size.staged_blocks * size.block_bytes
    with contextlib.ExitStack() as stack:
        kv = CudaKV(
            *pages.groups,
            staging_bytes=staging_bytes,
            num_lanes=_NUM_LANES,
            cuda=FaultyCuda(chip, fault),
            driver=chip.driver,
        )
        stack.callback(kv.close)
        if fault is Fault.SHARED_STAGING:
            share_staging(kv)
        arena = Arena(size.num_slots, size.block_bytes)
        stack.callback(arena.close)
        device = FaultyKV(kv, fault)
        device.attach(arena)
        lender = stack.enter_context(Lender.over(size.num_slots, size.block_bytes, device, fault))
        layered = layered_loads(kv, _NUM_LAYERS, fault) if size.parts == (1,) else None
        namespace = NamespaceId(bytes(16))
        mover = Mover(
            namespace=namespace,
            device=device,
            arena=arena,
            tiers=MoverTiers(by_name={}, inventory=InventoryLog([], namespace), lenders={POOL: lender}),
            num_load_threads=_LOAD_THREADS,
            layered=layered,
        )
        stack.callback(mover.close)
        engine = Engine(chip, mover, fault)
        yield Rig(chip, pages, engine, lender, size, numbers, layered)
        engine.settle()
        chip.cuda.synchronize(chip.device)


def _some(free: list[int], count: int, numbers: random.Random) -> list[int]:
    taken = [free.pop() for _ in range(count)]
    numbers.shuffle(taken)
    return taken
