"""Races through all that an engine has: its directory, with an arena that is too small for what is saved."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvtier.build.engine_cache import EngineCache, engine_cache
from kvtier.config import parse_config
from kvtier.device.cuda import CudaKV
from kvtier.errors import KvtierError
from kvtier.identity.keys import BlockKey
from kvtier.offload import JobResult
from kvtier.tiers.base import Status
from kvtier_bench.gpu.races.chip import Chip
from kvtier_bench.gpu.races.faults import Fault, FaultyCuda, FaultyKV
from kvtier_bench.gpu.races.pages import Pages
from kvtier_bench.gpu.races.rig import Size
from kvtier_bench.gpu.races.work import Queues, Steps, Work
from kvtier_bench.measuring.blocks import namespace_of

_LONG_S = 0.003
_MOST_STEPS = 10_000
_NUM_LANES = 8
"""The number of lanes: more than threads of the mover that `kvtier.build.engine_cache` makes."""


class Whole:
    """Device slots go from request to request, and blocks that were computed for earlier ones are asked for again. One
    thread."""

    def __init__(
        self, chip: Chip, pages: Pages, cache: EngineCache, size: Size, fault: Fault, numbers: random.Random
    ) -> None:
        self.pages, self.num_restored = pages, 0
        self._chip, self._cache, self._fault, self._numbers = chip, cache, fault, numbers
        self._work, self._steps = Work(chip, pages), Steps(chip)
        self._free, self._batch = list(range(size.num_blocks)), size.batch
        self._saving: dict[int, list[int]] = {}
        """Device slots that are not handed out yet, by save job."""
        self._ended: dict[int, JobResult] = {}
        """Results of loads, by job."""
        self._known: dict[BlockKey, int] = {}
        """The content of each block that was computed."""

    def play(self, number: int) -> None:
        """Plays a round: a request is computed and saved, its blocks and some older ones are looked up and loaded."""
        blocks = self._take()
        contents = self._work.contents(blocks)
        keys = self._cache.hashers["red"].hash_blocks([content for content in contents for _ in range(self._tokens)])
        self._known.update(zip(keys, contents, strict=True))
        self._step(self._work.hold_up(_LONG_S), self._work.write(blocks, contents))
        job = self._cache.hierarchy.save_full(list(zip(keys, blocks, strict=True)))
        if job is None or self._fault is Fault.NO_FLUSH:
            self._free += blocks
        else:
            self._saving[job] = blocks
        self._restore(number, keys)
        some = self._numbers.sample(list(self._known), min(self._batch, len(self._known)))
        self._restore(number, some)

    def settle(self) -> None:
        """Waits until no save and no step is under way."""
        for _ in range(_MOST_STEPS):
            if not self._saving:
                return self._steps.process(at_most_ahead=0)
            self._step()
            self._chip.pause()
        raise KvtierError(f"after {_MOST_STEPS} steps, {len(self._saving)} saves are not over")

    def _restore(self, number: int, keys: list[BlockKey]) -> None:
        """Loads those blocks that are in host memory to where a delayed step has just read, and compares them."""
        blocks = self._take()
        former = self._work.contents(blocks)
        self._step(self._work.write(blocks, former))
        self._step(self._work.hold_up(_LONG_S), self._work.check(number, blocks, former))
        ticket = self._cache.hierarchy.start_lookup(keys)
        statuses = self._cache.hierarchy.poll_lookup(ticket) or []
        hits = [key for key, status in zip(keys, statuses, strict=True) if status.status is not Status.MISS]
        job = self._cache.hierarchy.start_load(list(zip(hits, blocks, strict=False)))
        self._step()
        result = self._result(job)
        there = [index for index in range(len(hits)) if index not in result.failed]
        expected = [self._known[hits[index]] for index in there]
        self._step(self._work.check(number, [blocks[index] for index in there], expected))
        self.num_restored += len(there)
        self._free += blocks

    def _result(self, job: int) -> JobResult:
        for _ in range(_MOST_STEPS):
            if job in self._ended:
                return self._ended.pop(job)
            self._chip.pause()
            self._step()
        raise KvtierError(f"after {_MOST_STEPS} steps, a load is not over")

    def _take(self) -> list[int]:
        while len(self._free) < self._batch:
            self._chip.pause()
            self._step()
        return [self._free.pop() for _ in range(self._batch)]

    def _step(self, *work: Queues) -> None:
        self._steps.queue(*work)
        self._steps.process()
        for result in self._cache.hierarchy.poll():
            if result.kind == "load":
                self._ended[result.job_id] = result
            else:
                self._free += self._saving.pop(result.job_id, [])

    @property
    def _tokens(self) -> int:
        return self._cache.hashers["red"].tokens_per_block


@contextlib.contextmanager
def whole(chip: Chip, size: Size, *, rounds: int, fault: Fault, seed: int) -> Iterator[Whole]:
    """An engine's cache for the calling thread, built by `kvtier.build.engine_cache`."""
    pages = Pages(
        chip.device, num_blocks=size.num_blocks, part_bytes=size.part_bytes, parts=size.parts[:1], rounds=rounds
    )
    config = parse_config(
        {
            "tenant": "red",
            "tenants": {"red": {"secret": "env:SECRET"}},
            "host": {"capacity_bytes": size.num_slots * size.block_bytes},
        },
        source="races",
        folder=Path(),
        environ={"SECRET": "s" * 32},
    )
    with contextlib.ExitStack() as stack:
        kv = CudaKV(
            *pages.groups, staging_bytes=_NUM_LANES * size.staged_blocks * size.block_bytes, num_lanes=_NUM_LANES,
            cuda=FaultyCuda(chip, fault), driver=chip.driver,
        )  # fmt: skip
        stack.callback(kv.close)
        device = FaultyKV(kv, fault)
        cache = stack.enter_context(
            engine_cache(config, device=device, namespace=namespace_of(size.block_bytes), registry=CollectorRegistry())
        )
        built = Whole(chip, pages, cache, size, fault, random.Random(seed))
        yield built
        built.settle()
        chip.cuda.synchronize(chip.device)
