"""What `kvtier config check` says of an engine's settings, whichever engine it is."""

from collections.abc import Iterable

from kvtier.config import Config
from kvtier.config.certificate_findings import ending_certificates
from kvtier.config.engine_attempts import engine_attempts
from kvtier.config.findings import (
    Finding,
    Severity,
    errors_of,
    fields_of,
    room_in_memory,
    room_on_disk,
    size_words,
    without_effect,
)
from kvtier.system.memory import total_bytes

_LEAST_HOST_BYTES = 1 << 20
"""Host memory below which the cache is taken to be off."""


def engine_findings(config: Config) -> Iterable[Finding]:
    """Looks at what kvtier's own engine, vLLM's and SGLang's plug-ins have in common."""
    if not config.is_of_an_engine:
        return
    yield from errors_of(*engine_attempts(config, "cuda"))
    yield from ending_certificates(config, "engine", ["tls_certificate"])
    if config.engine.cache:
        yield from _memory(config)
        yield from _pool(config)
        yield from _disk(config)  # last: a disk may hang


def _memory(config: Config) -> Iterable[Finding]:
    effect = "all of it is touched at the start, and the kernel may end the engine"
    wanted, total = config.host_bytes(), total_bytes()
    if wanted < _LEAST_HOST_BYTES:
        text = f"{size_words(wanted)} hold no block of most models, and the cache is off then; use at least 1GiB"
        yield Finding(Severity.WARNING, "host.capacity_bytes", text, defeats=True)
    if total is None or wanted <= total:  # more is an error already
        yield from room_in_memory("host.capacity_bytes", wanted, effect)


def _disk(config: Config) -> Iterable[Finding]:
    disk = config.disk
    if disk.directory is None:
        yield from without_effect(config, "disk", fields_of(config, "disk"), "directory")
        return
    folder = config.references.path(disk.directory)
    yield from room_on_disk(
        "disk.capacity_bytes", folder, int(disk.capacity_bytes), int(disk.reserve_bytes), "disk.reserve_bytes"
    )


def _pool(config: Config) -> Iterable[Finding]:
    pool, cache = config.pool, config.cache
    if not pool.address:
        yield from without_effect(config, "pool", fields_of(config, "pool"), "address")
        if config.disk.directory is None:
            yield Finding(
                Severity.WARNING,
                "pool.address",
                "neither a pool nor a disk is below host memory: nothing is shared, and nothing survives a restart. "
                "Set pool.address or disk.directory",
            )
        return
    if pool.call_timeout_s > cache.load_deadline_s:
        yield Finding(
            Severity.WARNING,
            "pool.call_timeout_s",
            f"{pool.call_timeout_s:g} s, and the whole load ends after cache.load_deadline_s = "
            f"{cache.load_deadline_s:g} s: a call that is slow costs the load, and the breaker hears of it late",
        )
    if pool.connect_timeout_s > cache.lookup_deadline_s:
        yield Finding(
            Severity.WARNING,
            "pool.connect_timeout_s",
            f"{pool.connect_timeout_s:g} s, and a lookup waits cache.lookup_deadline_s = {cache.lookup_deadline_s:g} s "
            "at the most: make it no longer",
        )
    yield from ending_certificates(config, "pool", ("tls_ca", "tls_certificate"))
    others = pool.addresses_elsewhere()
    if others and pool.tls_ca is None and pool.insecure:
        yield Finding(
            Severity.WARNING,
            "pool.insecure",
            f"token and blocks travel to {', '.join(others)} in the clear; set pool.tls_ca (docs/tls.md)",
        )
