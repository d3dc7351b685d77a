"""Time to first token of the engine over a long cached document: on the device, in pinned host memory, in the pool."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from kvtier.bench.blocks import TENANT
from kvtier.bench.pool_process import PoolProcess, pool_process
from kvtier.bench.report import Case
from kvtier.bench.rounds import Samples
from kvtier.config import Config, parse_config
from kvtier.errors import KvtierError
from kvtier_engine.assemble import engine_of
from kvtier_engine.first_token import FirstToken, Prompts
from kvtier_engine.model_config import ModelConfig
from kvtier_engine.paged_kv import allocate_kv, bytes_per_block, kv_namespace
from kvtier_kernels_bench.models import model_of
from kvtier_kernels_bench.rows import median_s, row
from kvtier_kernels_bench.setting import Setting
from kvtier_kernels_bench.timing import DeviceClock, note

_TOKENS_PER_BLOCK = 16
_SPARE_BLOCKS = 2
"""Of the device, beyond one prompt: asking for one document evicts the other."""
_WARM_UP = 2
"""Loads from the pool, so that its memory is mapped and pinned, as it is in an engine that has been running."""
_DOCUMENTS_IN_HOST = 4
"""Both, the one that was forgotten last, and room for copies on their way."""
_LEAST_SHARE = 0.95
"""Of the cached tokens, that must come from where they are meant to."""


def measure(setting: Setting) -> Iterator[Case]:
    """Rounds of device, host and pool in turn, each the floor of the next, with one plain copy of the bytes beside."""
    cached, new = setting.size(16_384, 1024), setting.size(64, 8)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(_engine(setting, prompt_tokens=cached + new))
        first_token, config, registry = engine
        token_bytes = bytes_per_block(config, 1, setting.dtype)
        copy = _plain_copy(setting, cached * token_bytes)
        clock = DeviceClock(setting)
        documents = [
            Prompts(config.vocab_size, prompt_tokens=cached + new, new_tokens=new, seed=seed) for seed in range(2)
        ]
        for document in documents:
            first_token.ask(document.fresh())
            first_token.settle()  # more than may wait for the pool at a time would not be saved
        for _ in range(_WARM_UP):
            first_token.leave_to_the_pool()
            first_token.ask(documents[0].follow_up())
        samples: dict[str, Samples] = {}
        lent: list[float] = []
        """Of each load from the pool, the share that was copied from where it lies in the pool's memory."""

        def ask(document: Prompts, tier: str | None) -> float:
            """Seconds to the first token of a follow-up, whose document must be in this tier; of a new one if None."""
            prompt = document.follow_up() if tier is not None else document.fresh()
            found: dict[str, int] = {}
            seconds = clock.wall_s(lambda: found.update(first_token.ask(prompt)))
            if tier is not None and found.get(tier, 0) < _LEAST_SHARE * cached:
                raise KvtierError(f"{found} tokens were cached, which does not measure {tier}")
            return seconds

        def one_round() -> dict[str, float]:
            first_token.leave_to_the_pool()
            before = _num_lent(registry)
            taken = {"pool": ask(documents[0], "pool")}
            lent.append((_num_lent(registry) - before) * _TOKENS_PER_BLOCK / cached)
            taken["cold"] = ask(documents[1], None)
            first_token.settle()  # what was computed is in host memory then, too
            taken["device"] = ask(documents[1], "device")
            first_token.ask(documents[0].follow_up())
            taken["host"] = ask(documents[1], "host")
            return {**taken, "one pinned copy": clock.wall_s(copy)}

        # Rows are given before the engine and the pool are closed, which takes seconds.
        try:
            for _ in range(setting.rounds):
                left_s = setting.left_s()
                for name, seconds in one_round().items():
                    note(samples.setdefault(name, Samples()), seconds)
                if setting.left_s() < left_s - setting.left_s():  # another round would not end in time
                    break
        except KvtierError:
            yield from _rows(samples, lent, cached, new, cached * token_bytes)
            raise
        yield from _rows(samples, lent, cached, new, cached * token_bytes)


def _num_lent(registry: CollectorRegistry) -> float:
    """Blocks so far."""
    labels = {"tier": "pool", "op": "lend", "status": "hit"}
    return registry.get_sample_value("kvtier_tier_blocks_total", labels) or 0.0


def _rows(samples: dict[str, Samples], lent: list[float], cached: int, new: int, nbytes: int) -> Iterator[Case]:
    """Of all whole rounds."""
    if not samples:
        return
    op = f"time to first token, {new} new after {cached:,} cached"
    bound_s = median_s(samples["one pinned copy"])
    device_s = median_s(samples["device"])
    for name, of in samples.items():
        fetched = name in ("host", "pool")
        took_s = median_s(of)
        figures = {
            "x (device + one copy)": took_s / (device_s + bound_s),
            "copies more than the device": (took_s - device_s) / bound_s,
        }
        if name == "pool":
            figures["lent"] = median(lent)
        beside = {"one pinned copy": samples["one pinned copy"]} if fetched else {}
        yield row(
            name,
            op,
            of,
            floor=("device", samples["device"]),
            beside=beside,
            figures=figures if fetched else {},
            round_bytes=nbytes if name not in ("cold", "device") else 0,
        )


@contextlib.contextmanager
def _engine(setting: Setting, *, prompt_tokens: int) -> Iterator[tuple[FirstToken, ModelConfig, CollectorRegistry]]:
    model, config = model_of(setting)
    num_blocks = -(-(prompt_tokens + 1) // _TOKENS_PER_BLOCK) + _SPARE_BLOCKS
    kv = allocate_kv(config, num_blocks, _TOKENS_PER_BLOCK, setting.dtype, setting.device)
    namespace = kv_namespace(config, bytes(32), setting.dtype, setting.device)
    registry = CollectorRegistry()
    with tempfile.TemporaryDirectory(prefix="kvt") as folder, contextlib.ExitStack() as stack:
        pool = stack.enter_context(pool_process(Path(folder), setting.size(16 << 30, 64 << 20)))
        host_bytes = max(_DOCUMENTS_IN_HOST * num_blocks, 64) * kv.block_bytes
        settings = _config(pool, host_bytes)
        engine = stack.enter_context(engine_of(settings, model, config, kv, namespace, registry))
        yield FirstToken(engine, registry), config, registry


def _config(pool: PoolProcess, host_bytes: int) -> Config:
    settings: dict[str, Any] = {
        "tenant": TENANT,
        "tenants": {TENANT: {"secret": "env:BENCH_SECRET", "token": "env:BENCH_TOKEN"}},
        "host": {"capacity_bytes": host_bytes},
        "cache": {"clean_ahead_blocks": 0, "fetch": "always", "tokens_per_block": _TOKENS_PER_BLOCK},
        "pool": {"address": pool.unix},
    }
    environ = {"BENCH_SECRET": "of a benchmark, shared with nobody", "BENCH_TOKEN": pool.token}
    return parse_config(settings, source="make gpu", environ=environ)


def _plain_copy(setting: Setting, nbytes: int) -> Any:
    """All of the document's bytes from pinned memory to the device at once."""
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=setting.on_cuda)
    there = torch.empty(nbytes, dtype=torch.uint8, device=setting.device)
    return lambda: there.copy_(pinned, non_blocking=True)
