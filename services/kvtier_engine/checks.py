"""What `kvtier config check` says of the settings of kvtier's own engine."""

from collections.abc import Iterable

from kvtier.cli.sizing.model_shape import load_model_shape
from kvtier.config import Config
from kvtier.config.findings import Finding, Severity, size_words
from kvtier.errors import ConfigError
from kvtier.net.address import is_loopback
from kvtier.system.cores import usable_cores
from kvtier_engine.least_memory import too_small
from kvtier_engine.model.weight_files import weight_files

_MOST_TOKENS_PER_BLOCK = 256
_FEW_TOKENS = 4096


def own_engine_findings(config: Config) -> Iterable[Finding]:
    """Looks at a file whose table `engine` is set. Imports no torch."""
    engine = config.engine
    if "engine" not in config.model_fields_set:
        return
    host = engine.listen.rpartition(":")[0].strip("[]")
    if config.key_tenants() and engine.tls_certificate is None and not is_loopback(host):
        yield Finding(
            Severity.WARNING,
            "engine.tls_certificate",
            f"API keys travel to {engine.listen} in the clear; set it and tls_key, or listen on 127.0.0.1",
        )
    if config.gateway_tenants and not is_loopback(host):
        yield Finding(
            Severity.WARNING,
            "gateway_tenants",
            f"whoever reaches {engine.listen} may name any of these tenants and reads its cache, TLS or not. Let only "
            "the gateway reach it: listen on 127.0.0.1 beside it, or keep others out by a firewall or a network policy",
        )
    if not engine.cache and (config.pool.address or config.disk.directory is not None):
        yield Finding(Severity.WARNING, "engine.cache", "false: neither the pool nor the disk is used; set it to true")
    if engine.lossy_codec != "none" and engine.dtype != "bfloat16":
        yield Finding(Severity.ERROR, "engine.lossy_codec", 'needs engine.dtype = "bfloat16"; set it, or "none" here')
    cores = usable_cores()
    if engine.num_threads > cores:
        text = f"{engine.num_threads} threads wait for each other on {cores} cores; set it to {cores} at most, or to 0"
        yield Finding(Severity.WARNING, "engine.num_threads", text)
    tokens = config.cache.tokens_per_block
    if tokens > _MOST_TOKENS_PER_BLOCK or tokens & (tokens - 1):
        yield Finding(Severity.ERROR, "cache.tokens_per_block", f"{tokens}: this engine takes powers of two up to 256")
    yield from _model(config)


def _model(config: Config) -> Iterable[Finding]:
    if config.engine.model is None:
        if config.is_of_an_engine:
            yield Finding(Severity.WARNING, "engine.model", "missing: `kvtier engine serve` then needs --model")
        return
    path = config.references.path(config.engine.model)
    if not path.exists():
        yield Finding(Severity.ERROR, "engine.model", f"{path} is not there; name a Hugging Face folder or a GGUF file")
        return
    try:
        shape = load_model_shape(path)
    except ConfigError as error:
        yield Finding(Severity.ERROR, "engine.model", str(error))
        return
    try:
        if path.is_dir():
            weight_files(path)
    except ConfigError as error:
        yield Finding(Severity.ERROR, "engine.model", str(error))
    dtype = config.engine.dtype
    yield from _sizes(config, shape.bytes_per_token(dtype), shape.window_bytes(dtype, _FEW_TOKENS))


def _sizes(config: Config, token_bytes: int, window_bytes: int) -> Iterable[Finding]:
    """:param window_bytes: of a conversation's last window, in the layers that need no more."""
    refused = list(too_small(config, token_bytes * config.cache.tokens_per_block))
    yield from refused
    if refused:
        return
    tokens = int(config.engine.kv_bytes) // token_bytes
    if tokens < _FEW_TOKENS:
        yield Finding(
            Severity.WARNING,
            "engine.kv_bytes",
            f"{tokens:,} tokens at {size_words(token_bytes)} each: longer prompts are refused, and prefixes are "
            "evicted before they are hit; raise it",
        )
    block = token_bytes * config.cache.tokens_per_block
    capacities = [("engine.kv_bytes", int(config.engine.kv_bytes))]
    if config.engine.cache:
        capacities.append(("host.capacity_bytes", config.host_bytes()))
    if config.engine.cache and config.disk.directory is not None:
        capacities.append(("disk.capacity_bytes", int(config.disk.capacity_bytes)))
    conversation = token_bytes * _FEW_TOKENS + window_bytes
    for key, nbytes in capacities:
        yield Finding(
            Severity.NOTE,
            key,
            f"{size_words(nbytes)} are {nbytes // block:,} blocks of {config.cache.tokens_per_block} tokens, "
            f"{nbytes // token_bytes:,} tokens, or {nbytes // conversation:,} conversations of "
            f"{_FEW_TOKENS:,} tokens",
        )
