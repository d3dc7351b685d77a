"""What is looked at for an engine: its disk, its ways to the pool, its certificates, clocks, and what it has found."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from kvtier.cli.doctor.certificates import certificate_lines
from kvtier.cli.doctor.clocks import pool_clock
from kvtier.cli.doctor.disk import FolderSettings, folder_lines
from kvtier.cli.doctor.lines import Level, Line, Look
from kvtier.cli.doctor.pool_ways import Way, is_here, pool_lines
from kvtier.cli.doctor.serving import serving_line
from kvtier.cli.stats.facts import Facts, facts_of
from kvtier.cli.stats.requested import ENGINE
from kvtier.cli.stats.samples import fetch, metrics_url
from kvtier.config import Config
from kvtier.config.tls_files import pool_tls
from kvtier.errors import KvtierError
from kvtier.events import TierState
from kvtier.net.address import GRPC_PREFIX, UNIX_PREFIX, Address

_CLOCK_S = 2.0
_POOL = "pool"
_THERE = ("stored", "exists")
"""Answers to writes after which the pool has the block."""


def engine_looks(config: Config, file: Path | None) -> Iterable[Look]:
    """Looks for a file that says whose blocks an engine has. See `kvtier.cli.doctor.lines.Looks`."""
    if not config.is_of_an_engine:
        return
    if "engine" in config.model_fields_set:
        yield Look("engine.listen", lambda: _serving(config, file))
    if config.engine.cache:
        yield from _tiers(config, file)


def _tiers(config: Config, file: Path | None) -> Iterable[Look]:
    disk = config.disk
    if disk.directory is not None:
        folder = config.references.path(disk.directory)
        settings = FolderSettings(
            "disk.directory",
            folder,
            "disk.capacity_bytes",
            int(disk.capacity_bytes),
            int(disk.reserve_bytes),
            disk.direct_io,
        )
        yield Look(settings.key, partial(folder_lines, settings, file))
    if config.pool.address:
        yield Look("pool.address", lambda: _pool(config))
        yield Look("pool.tls_ca", lambda: _certificates(config))
        yield Look("clock", lambda: _clock(config))


def _serving(config: Config, file: Path | None) -> Iterable[Line]:
    """Asks kvtier's own engine how it is, and how its tiers are."""
    key, table = "engine.listen", config.engine
    is_tls = table.tls_certificate is not None
    yield serving_line(key, "engine", table.listen, file, path="/health", tls=is_tls)
    facts = _facts(config)
    for tier, of_tier in {} if facts is None else facts.tiers.items():
        if of_tier.state not in (None, TierState.WRITABLE.value):
            found = f"tier {tier} of the engine that answers there is {of_tier.state}"
            yield Line(
                Level.PROBLEM, key, found, "requests go on without it", "see the engine's log and docs/errors.md"
            )


def _clock(config: Config) -> Iterable[Line]:
    """Asks pools on other machines, at the HTTP port that they have unless somebody has chosen another."""
    port = config.pool_service.http_listen.rpartition(":")[2]
    others = [address for address in config.pool.address if UNIX_PREFIX not in address and not is_here(address)]
    for host in sorted({Address.parse(address.removeprefix(GRPC_PREFIX)).host for address in others}):
        yield from pool_clock(f"[{host}]" if ":" in host else host, port, _CLOCK_S)


def _pool(config: Config) -> Iterable[Line]:
    ways: list[Way] = []
    yield from pool_lines(config, ways)
    usage = next((way.usage for way in ways if way.usage is not None), None)
    facts = _facts(config)
    if usage is not None and facts is not None:
        yield from strangers(facts, usage.num_blocks)


def strangers(facts: Facts, num_blocks: int) -> Iterable[Line]:
    """Says whether an engine that runs finds nothing in a pool that has blocks of its tenant by others.

    :param num_blocks: of the tenant, in the pool.
    """
    if not facts.hit_rate.asked or facts.hit_rate.by_tier.get(_POOL):
        return
    of_pool = facts.tiers.get(_POOL)
    if of_pool is not None and num_blocks <= sum(of_pool.written.get(status, 0) for status in _THERE):
        return  # all that is there may be what this engine has written
    yield Line(
        Level.WARNING,
        "pool.address",
        f"the pool has {num_blocks:,} blocks of this tenant, and this engine has found none of them in "
        f"{facts.hit_rate.asked:,.0f} {facts.hit_rate.unit}",
        "they are of another namespace (another model, or another way to compute it), or no prompt begins alike",
        "engines share with the same weights, dtype, lossy_codec, device, ranks, tokens_per_block, tenant, secret and "
        "salt: compare kvtier config show --all of both",
    )


def _facts(config: Config) -> Facts | None:
    """What kvtier's own engine says of itself, if it runs here, without TLS; None: it does not, or is another one."""
    listen = config.engine.listen
    if "engine" not in config.model_fields_set or listen.endswith(":0") or config.engine.tls_certificate is not None:
        return None
    try:
        facts = facts_of(fetch(metrics_url(listen)))
    except KvtierError:
        return None
    return facts if facts is not None and facts.kind == ENGINE else None


def _certificates(config: Config) -> Iterable[Line]:
    files = pool_tls(config)
    if files is None:
        return
    for key, path in (("pool.tls_ca", files.ca), ("pool.tls_certificate", files.certificate)):
        if path is not None:
            yield from certificate_lines(key, path)
