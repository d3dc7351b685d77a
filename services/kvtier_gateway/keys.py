"""API keys: whose a request is, and how much its key may ask for."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.clock import MONOTONIC, WALL, Clock
from kvtier.config import Config
from kvtier.config.accepted import accepted_api_keys
from kvtier.config.gateway import ApiKeyConfig
from kvtier.system.token_bucket import TokenBucket
from kvtier_gateway.http.api_errors import ApiError, retry_after

_SCHEME = "bearer "
_MAX_KEY_BYTES = 1024


class Client:
    """A client: it has one of the keys of a table `[api_keys.NAME]`. Event loop only."""

    def __init__(self, name: str, table: ApiKeyConfig, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self._bucket: TokenBucket | None = None
        self.num_running = 0
        self.set(table)

    @property
    def tenant(self) -> str:
        """The tenant whose cache its requests use."""
        return self.table.tenant

    def set(self, table: ApiKeyConfig) -> None:
        """These are its rights from now on. A rate that stays the same goes on as it was."""
        rate = table.max_requests_per_s
        if rate is None:
            self._bucket = None
        elif self._bucket is None or self._bucket.per_s != rate:
            self._bucket = TokenBucket(rate, self._clock())
        self.table = table

    @contextmanager
    def admitted(self) -> Iterator[Callable[[int], None]]:
        """Counts a request while it runs. Raises `ApiError` with 429 where the key may have no more.

        Yields what is to be called with the number of answers that it asks for, once that is known: each counts as a
        request. It raises `ApiError` where the key may not have so many, with 429 if it may later.
        """
        if self.num_running >= self.table.max_concurrent:
            raise _too_many(self.table.max_concurrent)
        if self._bucket is not None:
            owed_s = self._bucket.owed_s(1.0, self._clock())
            if owed_s > 0:
                raise _refused("rate", f"this key may have {self._bucket.per_s:g} requests a second", owed_s)
            self._bucket.take(1.0)
        num_answers = 1
        self.num_running += num_answers

        def count(num: int) -> None:
            nonlocal num_answers
            most = self.table.max_concurrent
            if num > most:
                message = f"it asks for {num:,} answers, and this key may have {most:,} at a time; ask for fewer"
                raise ApiError(400, message, param="n", code="too_many_answers")
            if self.num_running + num - num_answers > most:
                raise _too_many(most)
            self.num_running += num - num_answers
            num_answers = num

        try:
            yield count
        finally:
            self.num_running -= num_answers


@dataclass(frozen=True, slots=True)
class _Known:
    client: Client
    expires_at_s: float | None


class ApiKeys:
    """Knows clients by the SHA-256 of their keys. Event loop only."""

    def __init__(self, config: Config, clock: Clock = WALL, monotonic: Clock = MONOTONIC) -> None:
        """
        :param clock: by which keys expire, in seconds since 1970.
        :param monotonic: by which rates go.
        """
        self._clock, self._monotonic = clock, monotonic
        self._clients: dict[str, Client] = {}
        self._by_digest: dict[bytes, _Known] = {}
        self.set(config)

    def set(self, config: Config) -> None:
        """These keys are accepted from now on, and no others. Requests that are running go on.

        Raises `ConfigError`, and changes nothing, for keys that cannot be.
        """
        accepted = accepted_api_keys(config)
        for name, table in config.api_keys.items():
            if name in self._clients:
                self._clients[name].set(table)
            else:
                self._clients[name] = Client(name, table, self._monotonic)
        self._clients = {name: self._clients[name] for name in config.api_keys}
        self._by_digest = {
            bytes.fromhex(each.digest): _Known(self._clients[each.name], each.expires_at_s) for each in accepted
        }

    def client_of(self, authorization: Sequence[str]) -> Client:
        """The client of a request with these `Authorization` headers. Raises `ApiError` with 401.

        What is looked up is a digest of the key: how long that takes tells nothing of a key that is not known.
        """
        key = authorization[0][len(_SCHEME) :] if len(authorization) == 1 else ""
        if not key or authorization[0][: len(_SCHEME)].lower() != _SCHEME:
            raise _unauthorized("send your API key in one header `Authorization: Bearer KEY`")
        encoded = key.encode(errors="surrogateescape")
        known = None
        if len(encoded) <= _MAX_KEY_BYTES:
            known = self._by_digest.get(hashlib.sha256(encoded).digest())
        if known is None:
            raise _unauthorized("this API key is not known here")
        if known.expires_at_s is not None and self._clock() >= known.expires_at_s:
            raise _unauthorized("this API key has expired")
        return known.client


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _too_many(most: int) -> ApiError:
    return _refused("concurrency", f"this key may have {most:,} requests at a time, and each answer counts as one", 1.0)


def _refused(limit: str, message: str, wait_s: float) -> ApiError:
    return ApiError(429, f"{message}; send it again later", code=f"{limit}_limit_exceeded", headers=retry_after(wait_s))
