"""Time to first token of the engine over a long cached document: on the device, in pinned host memory, in the pool."""

import contextlib
import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from kvtier.config import Config, parse_config
from kvtier.errors import KvtierError
from kvtier_bench.cases.first_token import FirstToken, Prompts
from kvtier_bench.gpu.measuring.comparing import require_equal
from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.models import weights_of
from kvtier_bench.gpu.measuring.rows import Bar, held_to, median_s, row
from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.gpu.measuring.timing import DeviceClock, note
from kvtier_bench.measuring.blocks import TENANT
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples
from kvtier_bench.processes.pool_process import PoolProcess, pool_process
from kvtier_engine.assemble import engine_of
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.model_config import ModelConfig
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv, bytes_per_block, kv_namespace

_TOKENS_PER_BLOCK = 16
_SPARE_BLOCKS = 2
"""The blocks that the device has beyond one prompt: asking for one document evicts the other."""
_WARM_UP = 2
"""Loads from the pool, so that its memory is mapped and pinned, as it is in an engine that has been running."""
_DOCUMENTS_IN_HOST = 4
"""The room of host memory, in documents: for both, the one that was forgotten last, and copies on their way."""
_LEAST_SHARE = 0.95
"""The share of the cached tokens that must come from where they are meant to."""
_MOST_COPIES = {"host": 1.3, "pool": 1.6}
"""What a load is held to: one plain copy of its bytes, so many times, beyond a hit on the device."""
_Changes = Mapping[str, Mapping[str, Any]]
"""What is set otherwise than by default, by section of the configuration."""
_SWITCHES: Mapping[str, Mapping[str, _Changes]] = {
    "pool": {
        "as configured by default": {},
        "verified on the host": {"cache": {"verify_loads": "host"}},
        "without direct reads": {"pool": {"direct_loads": False}},
        "without the tier process": {"cache": {"io_process": False}},
    },
    "host": {
        "as configured by default": {},
        "not by layer": {"engine": {"layerwise_loads": False}},
    },
}
_SWITCH_ROUNDS = 5


def measure(setting: Setting) -> Iterator[Case]:
    """Rounds of device, host and pool in turn, each the floor of the next, with one plain copy of the bytes beside."""
    model, config = _watched(setting)
    with _documents(setting, model, config, {}) as documents:
        samples: dict[str, Samples] = {}
        # Rows are given before the engine and the pool are closed, which takes seconds.
        try:
            for _ in range(setting.rounds):
                left_s = setting.left_s()
                for name, seconds in documents.one_round().items():
                    note(samples.setdefault(name, Samples()), seconds)
                if setting.left_s() < left_s - setting.left_s():  # another round would not end in time
                    break
        finally:
            yield from _rows(setting, samples, documents)


def switches(setting: Setting) -> Iterator[Case]:
    """What comes from the pool and from host memory, with parts of the way switched off. Engines one after the other,
    the same model."""
    model, config = _watched(setting)
    measured: dict[str, dict[str, Samples]] = {tier: {} for tier in _SWITCHES}

    def switched(tier: str, name: str) -> Iterator[Case]:
        samples = Samples()
        with _documents(setting, model, config, _SWITCHES[tier][name]) as documents:
            for _ in range(setting.size(_SWITCH_ROUNDS, 1)):
                note(samples, documents.from_pool() if tier == "pool" else documents.from_host())
            measured[tier][name] = samples
            first, default = next(iter(measured[tier].items()))
            floor = (first, Samples(default.rounds_s[: len(samples.rounds_s)]))
            figures = {"lent": median(documents.lent)} if documents.lent else {}
            op = _op_of(tier)
            yield row(name, op, samples, floor=floor, figures=figures, round_bytes=documents.cached_bytes)

    plays = [(tier, name) for tier, changes in _SWITCHES.items() for name in changes]
    yield from each(setting, {f"{_op_of(tier)}, {name}": partial(switched, tier, name) for tier, name in plays})


def _op_of(tier: str) -> str:
    """What rows of a report call a hit in this tier."""
    return f"time to first token from {'the pool' if tier == 'pool' else 'host memory'}"


class _WatchedModel(LlamaModel):
    """Remembers which blocks the sequence had that it computed last."""

    table: Sequence[int] = ()

    def forward(self, chunks: Sequence[Chunk], kv: PagedKV, *arguments: Any, **options: Any) -> Tensor:
        """Computes as `LlamaModel.forward` does, and remembers the last chunk's blocks."""
        self.table = list(chunks[-1].block_table)
        return super().forward(chunks, kv, *arguments, **options)


class _Documents:
    """Two documents, and follow-ups to them whose bytes come from one tier. The engine's thread."""

    def __init__(
        self, setting: Setting, model: _WatchedModel, config: ModelConfig, kv: PagedKV, first_token: FirstToken
    ) -> None:
        self.cached, self.new = setting.size(16_384, 1024), setting.size(64, 8)
        self.cached_bytes = self.cached * bytes_per_block(config, 1, setting.dtype)
        self.lent: list[float] = []
        """The share of each load from the pool that was copied from where it lies in the pool's memory."""
        self._setting, self._model, self._kv, self._first_token = setting, model, kv, first_token
        self._clock, self._copy = DeviceClock(setting), _plain_copy(setting, self.cached_bytes)
        length = self.cached + self.new
        self._prompts = [
            Prompts(config.vocab_size, prompt_tokens=length, new_tokens=self.new, seed=seed) for seed in range(2)
        ]
        self._computed: dict[Prompts, Tensor] = {}
        """Blocks of each document as they were computed, by their sums."""

    def get_ready(self, registry: CollectorRegistry) -> None:
        """The documents are computed and saved, and the pool's memory is pinned."""
        self._registry = registry
        for document in self._prompts:
            self._first_token.ask(document.fresh())
            self._computed[document] = self._sums()
            self._first_token.settle()  # more than may wait for the pool at a time would not be saved
        for _ in range(_WARM_UP):
            self._first_token.leave_to_the_pool()
            self._first_token.ask(self._prompts[0].follow_up())

    def from_pool(self) -> float:
        """Seconds to the first token of a follow-up to the first document."""
        self._first_token.leave_to_the_pool()
        before = self._num_lent()
        seconds = self._ask(self._prompts[0], "pool")
        self.lent.append((self._num_lent() - before) * _TOKENS_PER_BLOCK / self.cached)
        return seconds

    def from_host(self) -> float:
        """Seconds to the first token of a follow-up to the second document, computed before another one took its
        place on the device."""
        self._ask(self._prompts[1], None)
        self._computed[self._prompts[1]] = self._sums()
        self._first_token.settle()
        self._first_token.ask(self._prompts[0].follow_up())
        return self._ask(self._prompts[1], "host")

    def one_round(self) -> dict[str, float]:
        """Seconds to the first token, by where the document is."""
        taken, second = {"pool": self.from_pool()}, self._prompts[1]
        taken["cold"] = self._ask(second, None)
        self._computed[second] = self._sums()
        self._first_token.settle()  # what was computed is in host memory then, too
        taken["device"] = self._ask(second, "device")
        self._first_token.ask(self._prompts[0].follow_up())
        taken["host"] = self._ask(second, "host")
        return {**taken, "one pinned copy": self._clock.wall_s(self._copy)}

    def _ask(self, document: Prompts, tier: str | None) -> float:
        """The time to first token of a follow-up, whose document must be in this tier; of a new document if None.

        :raises WrongResultError: what was loaded is not what was computed.
        """
        prompt = document.follow_up() if tier is not None else document.fresh()
        found: dict[str, int] = {}
        seconds = self._clock.wall_s(lambda: found.update(self._first_token.ask(prompt)))
        if tier is not None:
            if found.get(tier, 0) < _LEAST_SHARE * self.cached:
                raise KvtierError(f"{found} tokens were cached, which does not measure {tier}")
            num_cached = sum(found.values()) // _TOKENS_PER_BLOCK
            require_equal(f"blocks from {tier}", self._sums()[:num_cached], self._computed[document][:num_cached])
        return seconds

    def _sums(self) -> Tensor:
        """A sum of the bytes of each block of the last prompt, in its order: other bytes have other sums."""
        words = self._kv.byte_rows().view(torch.int64)
        factors = torch.arange(words.size(1), device=words.device) * 2 + 1  # odd: a number elsewhere counts otherwise
        num_full = (self.cached + self.new) // _TOKENS_PER_BLOCK
        return torch.stack([(words[block] * factors).sum() for block in self._model.table[:num_full]])

    def _num_lent(self) -> float:
        """Blocks so far."""
        labels = {"tier": "pool", "op": "lease", "status": "hit"}
        return self._registry.get_sample_value("kvtier_tier_blocks_total", labels) or 0.0


def _rows(setting: Setting, samples: dict[str, Samples], documents: _Documents) -> Iterator[Case]:
    """The rows of all whole rounds."""
    if not samples:
        return
    op = f"time to first token, {documents.new} new after {documents.cached:,} cached"
    bound_s = median_s(samples["one pinned copy"])
    device_s = median_s(samples["device"])
    for name, of in samples.items():
        fetched = name in _MOST_COPIES
        case = row(
            name,
            op,
            of,
            floor=("device", samples["device"]),
            beside={"one pinned copy": samples["one pinned copy"]} if fetched else {},
            figures={"lent": median(documents.lent)} if name == "pool" else {},
            round_bytes=documents.cached_bytes if name not in ("cold", "device") else 0,
        )
        copies = (median_s(of) - device_s) / bound_s
        bar = Bar("copies more than the device", copies, _MOST_COPIES.get(name, 0.0), at_most=True)
        yield held_to(case, bar, tiny=setting.tiny) if fetched else case


def _watched(setting: Setting) -> tuple[_WatchedModel, ModelConfig]:
    weights, config = weights_of(setting)
    return _WatchedModel(config, weights), config


@contextlib.contextmanager
def _documents(setting: Setting, model: _WatchedModel, config: ModelConfig, changes: _Changes) -> Iterator[_Documents]:
    """The documents, in an engine and a pool of their own.

    :param changes: to the engine's configuration, by section.
    """
    prompt_tokens = setting.size(16_384 + 64, 1024 + 8)
    num_blocks = -(-(prompt_tokens + 1) // _TOKENS_PER_BLOCK) + _SPARE_BLOCKS
    kv = allocate_kv(config, num_blocks, _TOKENS_PER_BLOCK, setting.dtype, setting.device)
    namespace = kv_namespace(config, bytes(32), setting.dtype, setting.device)
    registry = CollectorRegistry()
    with tempfile.TemporaryDirectory(prefix="kvt") as folder, contextlib.ExitStack() as stack:
        pool = stack.enter_context(pool_process(Path(folder), setting.size(16 << 30, 64 << 20)))
        host_bytes = max(_DOCUMENTS_IN_HOST * num_blocks, 64) * kv.block_bytes
        settings = _config(pool, host_bytes, changes)
        engine = stack.enter_context(engine_of(settings, model, config, kv, namespace, registry))
        documents = _Documents(setting, model, config, kv, FirstToken(engine, registry, setting.left_s))
        documents.get_ready(registry)
        gc.freeze()  # as an engine does that has started
        stack.callback(gc.unfreeze)
        yield documents


def _config(pool: PoolProcess, host_bytes: int, changes: _Changes) -> Config:
    settings: dict[str, Any] = {
        "tenant": TENANT,
        "tenants": {TENANT: {"secret": "env:BENCH_SECRET", "token": "env:BENCH_TOKEN"}},
        "host": {"capacity_bytes": host_bytes},
        "cache": {"clean_ahead_blocks": 0, "fetch": "always", "tokens_per_block": _TOKENS_PER_BLOCK},
        "pool": {"address": pool.unix},
    }
    for section, values in changes.items():
        settings[section] = {**settings.get(section, {}), **values}
    environ = {"BENCH_SECRET": "of a benchmark, shared with nobody", "BENCH_TOKEN": pool.token}
    return parse_config(settings, source="make gpu", environ=environ)


def _plain_copy(setting: Setting, nbytes: int) -> Run:
    """Copies the document's bytes from pinned memory to the device at once."""
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=setting.on_cuda)
    there = torch.empty(nbytes, dtype=torch.uint8, device=setting.device)
    return lambda: there.copy_(pinned, non_blocking=True)
