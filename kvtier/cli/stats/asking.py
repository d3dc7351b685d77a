"""Asks engines and pools for `kvtier stats` and `kvtier top`."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.cli.stats.requested import kind_of
from kvtier.cli.stats.samples import Samples, fetch, metrics_url, reachable
from kvtier.config import Config, load_config, parse_config
from kvtier.errors import ConfigError, KvtierError

_MOST_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class Heard:
    """One page of a process, or why there is none."""

    url: str
    at_s: float
    """When it was asked, in seconds since 1970."""
    samples: Samples | None
    problem: str | None


class Places:
    """Pages of metrics to ask for, and with which CA and token. One thread calls it."""

    def __init__(self, config: Path | None, urls: Sequence[str], ca: Path | None, token: str | None) -> None:
        """Asks nobody yet.

        :param config: of an engine or a pool: what it names is asked where `urls` name nothing.
        :param token: `env:NAME` or `file:PATH` of an operator's or observer's token.
        :raises ConfigError: the file, an address or the token cannot be used, or nothing is named.
        """
        settings = load_config(config) if config is not None else parse_config({}, source="environment")
        self.urls = [metrics_url(url) for url in urls] or _configured(settings)
        if not self.urls and "gateway" in settings.model_fields_set:
            raise ConfigError("the file is a gateway's: name the engines behind it, each with --url host:port")
        if not self.urls:
            raise ConfigError("nowhere to ask: every port is 0; name one with --url host:port")
        self.ca = ca or _ca_of(settings)
        of_options = replace(settings.references, source="command line")
        self.token = None if token is None else of_options.secret("--token", token)

    def ask(self) -> list[Heard]:
        """Asks all at once. Blocks as long as the slowest takes, some seconds at most; raises nothing that they do."""
        with ThreadPoolExecutor(min(len(self.urls), _MOST_AT_A_TIME), "kvtier-ask") as threads:
            return list(threads.map(self._ask, self.urls))

    def _ask(self, url: str) -> Heard:
        at_s = time.time()
        try:
            samples = fetch(url, ca=self.ca, token=self.token)
        except KvtierError as error:
            return Heard(url, at_s, None, str(error))
        if kind_of(samples) is None:
            return Heard(url, at_s, None, f"{url} is neither an engine nor a pool: {_what_else(samples)}")
        return Heard(url, at_s, samples, None)


def _what_else(samples: Samples) -> str:
    if any(name.startswith("kvtier_gateway_") for name in samples.names()):
        return "it is a gateway; ask the engines behind it, which its /engines lists"
    return "it has none of their metrics"


def _configured(config: Config) -> list[str]:
    """Returns where the file's engine and pool listen, without those that take any free port. A file that has the table
    of a pool, and neither an engine's address nor a tenant that it would need, is a pool's alone, and the other way
    round."""
    pool_scheme = "https" if config.pool_service.tls_certificate is not None else "http"
    is_engines = config.is_of_an_engine or "listen" in config.engine.model_fields_set
    is_pools = "pool_service" in config.model_fields_set
    places = []
    if not (is_engines or is_pools) and "gateway" in config.model_fields_set:
        return []
    if is_engines or not is_pools:
        places.append(("http" if config.engine.tls_certificate is None else "https", config.engine.listen))
    if is_pools or not is_engines:
        places.append((pool_scheme, config.pool_service.http_listen))
    return [metrics_url(f"{scheme}://{reachable(address)}") for scheme, address in places if not address.endswith(":0")]


def _ca_of(config: Config) -> Path | None:
    return None if config.pool.tls_ca is None else config.references.path(config.pool.tls_ca)
