"""What `kvtier doctor` looks at for a gateway: its engines, its pool, its tokenizer, and whether it serves."""

import ssl
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from pathlib import Path

from kvtier.cli.doctor.lines import Level, Line, Look
from kvtier.cli.doctor.pool_failures import failure_line
from kvtier.cli.doctor.pool_ways import try_way
from kvtier.cli.doctor.serving import serving_line
from kvtier.clock import MONOTONIC
from kvtier.config import Config
from kvtier.config.gateway import DNS_PREFIX, GatewayEngineConfig
from kvtier.config.tls_files import gateway_engine_tls, pool_tls
from kvtier.net.certificates import client_context
from kvtier.net.tls import client_tls
from kvtier_gateway.engine_failures import explained
from kvtier_gateway.engines.page import takes_tenants

_HTTP_S, _POOL_S = 3.0, 15.0
_MOST_PAGE_BYTES = 16 << 20
_AT_ONCE = 64


def gateway_looks(config: Config, file: Path | None) -> Iterable[Look]:
    """Looks for a file whose table `gateway` is set. See `kvtier.cli.doctor.lines.Looks`."""
    if "gateway" not in config.model_fields_set:
        return
    yield Look("gateway.engines", partial(_engines, config))
    key, listen = "gateway.status_listen", config.gateway.status_listen
    yield Look(key, lambda: [serving_line(key, "gateway", listen, file)])
    if config.pool.address and any(tenant.token is not None for tenant in config.tenants.values()):
        yield Look("pool.address", partial(_pool, config))
    if config.gateway.tokenizer is not None:
        yield Look("gateway.tokenizer", partial(_tokenizer, config))


def _engines(config: Config) -> Iterable[Line]:
    """Asks every engine as the gateway does; of a name with several addresses, whichever answers."""
    engines = config.gateway.engines
    files = gateway_engine_tls(config)
    context = ssl.create_default_context() if files is None else client_context(files)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvtier-doctor-engine") as threads:
        problems = list(threads.map(partial(_problem_of, context, files is not None), engines))
    works = sum(problem is None for problem in problems)
    for engine, problem in zip(engines, problems, strict=True):
        if problem is not None:
            effect = "it gets no requests" if works else "no request is served"
            level = Level.WARNING if works else Level.PROBLEM
            yield Line(level, f"gateway.engines {engine.url}", problem[0], effect, problem[1])
    if works:
        yield Line(Level.OK, "gateway.engines", f"{works} of {len(engines)} answer and may get requests")


def _problem_of(context: ssl.SSLContext, has_ca: bool, engine: GatewayEngineConfig) -> tuple[str, str] | None:
    """Why an engine gets no requests, and what to do; None: it gets some."""
    url = engine.url.removeprefix(DNS_PREFIX)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        opener.open(f"{url}/health", timeout=_HTTP_S).close()
        with opener.open(f"{url}/metrics", timeout=_HTTP_S) as answer:
            page = answer.read(_MOST_PAGE_BYTES)
    except (OSError, HTTPException) as error:
        return explained(url, error, has_ca=has_ca)
    is_of_several = engine.tenants is None or len(engine.tenants) > 1
    if engine.isolation == "tenant" and is_of_several and not takes_tenants(page):
        remedy = 'start it with kvtier, or set isolation = "cache_salt" for it'
        return "its /metrics does not show that it runs kvtier: tenants would share its cache", remedy
    return None


def _pool(config: Config) -> Iterable[Line]:
    """Tries every address with the token of every tenant that has one."""
    deadline = MONOTONIC() + _POOL_S
    tls = client_tls(pool_tls(config), config.pool.tls_server_name)
    effect = "requests do not go to where the pool has their blocks"
    for tenant, table in config.tenants.items():
        if table.token is None:
            continue
        ways = [try_way(config, tenant, address, tls, deadline) for address in config.pool.address]
        works = [way.address for way in ways if way.failure is None]
        for way in ways:
            if way.failure is not None:
                level = Level.WARNING if works else Level.PROBLEM
                told = "another way is taken" if works else effect
                yield failure_line(config, tenant, way.address, way.failure, level, told)
        if works:
            yield Line(Level.OK, "pool.address", f"the pool answers tenant {tenant!r} at {', '.join(works)}")


def _tokenizer(config: Config) -> Iterable[Line]:
    # Imported here: the doctor asks for the looks of a gateway in the pool's image, too, which has no tokenizers.
    from kvtier.text.prompts import PromptTokenizer

    assert config.gateway.tokenizer is not None
    folder = config.references.path(config.gateway.tokenizer)
    if (folder / "tokenizer.json").is_file():  # `kvtier config check` says it otherwise
        PromptTokenizer(folder)
        yield Line(Level.OK, "gateway.tokenizer", f"{folder} has one that can be read")
