"""The table of the gateway, and those of API keys."""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field

from kvtier.config.credentials import Tokens
from kvtier.config.fields import Bytes, Count, HttpAddress, Seconds, SecretReference, Section, TierBytes

DNS_PREFIX = "dns+"
"""What the URL of engines begins with whose name has one address for each of them."""


def _checked_engine_url(text: str) -> str:
    url = text.removeprefix(DNS_PREFIX)
    try:
        parts = urlsplit(url)
        has_address = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        has_address = None
    if not has_address or "@" in parts.netloc or parts.query or parts.fragment or parts.path.strip("/"):
        raise ValueError(f"{text!r}: use http://host:port or https://host:port, with {DNS_PREFIX} for many of one name")
    return text.rstrip("/")


EngineUrl = Annotated[str, AfterValidator(_checked_engine_url)]
"""`http://host:port` or `https://host:port`, maybe behind `dns+`."""


class GatewayEngineConfig(Section):
    """An engine, or all engines of a name, behind the gateway."""

    url: EngineUrl
    """`http://host:port` of one engine, or `dns+http://host:port` of as many as the name has addresses."""
    isolation: Literal["tenant", "cache_salt"] = "tenant"
    """How the engine is told whose a request is. `tenant`: by `kv_transfer_params.kvtier.tenant`, which engines with
    kvtier take whose `gateway_tenants` names the tenant; one that does not show on its /metrics that it runs kvtier
    gets no requests, unless `tenants` has a single name. `cache_salt`: by that field, for vLLM and SGLang without
    kvtier, whose own prefix caches it separates."""
    tenants: list[str] | None = None
    """The tenants whose requests it may get. Left out: all. With `cache_salt`, tenants share what is not their own
    cache, so an engine whose tiers belong to one tenant is to be named here with that one."""
    events: str | None = None
    """ZeroMQ endpoint of its KV events, such as `tcp://10.0.0.1:5557`; `{host}` stands for the host of its URL. For the
    strategies `precise`, `dynamo` and `priced`; of vLLM or kvtier's own engine. Without: what it holds is guessed."""
    events_replay: str | None = None
    """Endpoint at which events are to be had that were missed. Without: a gap makes the gateway forget what the engine
    holds."""
    draining: bool = False
    """Whether it gets no new requests; those that it has go on. Read again as keys are: to take an engine away, set
    this, wait until `kvtier_gateway_running` is 0 for it, and stop it."""


def _as_table(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


class ApiKeyConfig(Section):
    """An API key of clients of the gateway, or several with the same rights; or of `kvtier engine`, where no gateway
    names tenants: then every request under `/v1` needs one, and `tenant` and `key_sha256` are all that counts."""

    tenant: str
    """The tenant that requests with it are of."""
    key_sha256: Tokens = Field(default=[])
    """Lower-case hex SHA-256 of each key that is accepted, as text or as `env:` / `file:`, or tables of `sha256` and
    `expires_at`; two while a key is replaced. The gateway reads it again when the file changes, and on SIGHUP, as all
    of this table; `kvtier engine` at its start."""
    max_requests_per_s: Annotated[float, Field(ge=0.01, le=1e6)] | None = None
    """Requests a second. As many may come at once after a quiet second. Beyond that they are answered with 429. Left
    out: no such bound."""
    max_concurrent: Count = 256
    """Requests at a time, those included whose bodies are still being sent; more are answered with 429. One that asks
    for several answers (`n`, `best_of`, several prompts) counts as so many. Small: clients wait though engines are
    idle. Large: one client may fill all engines' queues."""
    may_pin: bool = False
    """Whether its requests may pin what they bring to the cache pool (`pin` and `ttl_s` of
    `kv_transfer_params.kvtier`). Without, these are taken out of the request."""


class GatewayConfig(Section):
    """The gateway of `kvtier gateway serve`."""

    listen: HttpAddress = "127.0.0.1:8080"
    """`host:port` of the OpenAI API for clients; port 0 takes a free one."""
    status_listen: HttpAddress = "127.0.0.1:8081"
    """`host:port` of /metrics, /healthz and /engines, which ask nobody who he is, for Prometheus, probes and operators.
    Keep it where clients do not reach it: it shows names of engines, of their tenants and models, and how busy they
    are."""
    metrics_access: Literal["totals", "tenants"] = "totals"
    """What /metrics shows where other machines reach `status_listen`: `totals` of all tenants and API keys together;
    `tenants`: the figures of each, by name, to anybody who reaches it. On a loopback address it shows these always."""
    engines: list[Annotated[GatewayEngineConfig, BeforeValidator(_as_table)]] = Field(default=[])
    """The engines, each by its URL, or as a table of `url` and more. Read again when the file changes, and on SIGHUP:
    those that are gone get no new requests, and finish what they have."""
    engine_token: SecretReference | None = None
    """`env:NAME` or `file:PATH` of the bearer token that engines want (`--api-key` in vLLM). Without: none is sent.
    Clients' own keys never get to engines."""
    engine_tls_ca: Path | None = None
    """CAs, in PEM, of the certificates of engines with https, read again when the file changes. Without: those of the
    system."""
    strategy: Literal[
        "round_robin", "least_loaded", "session", "chwbl", "hash_trie", "simhash", "radix", "epp", "precise", "dynamo",
        "priced",
    ] = "priced"  # fmt: skip
    """How the engine for a request is chosen: see `docs/routing.md`."""
    tokenizer: Path | None = None
    """Folder of the model's tokenizer (`tokenizer.json`, and the chat template), as engines have it, for strategies
    that go by keys of blocks. Without: they see no keys."""
    tokens_bytes: Bytes = ByteSize(256 * 2**20)
    """Memory for tokens of messages that may come again, 4 bytes each. Small: conversations are tokenised whole at each
    turn."""
    pool_lookup_timeout_s: Annotated[float, Field(gt=0, le=10)] = 0.05
    """How long a request waits for the pool to say which of its blocks it has. Then its engine is chosen without that.
    The pool is that of `[pool]`, with the `token` of the request's tenant."""
    session_header: str = "X-Session-Id"
    """The header of a request that names the session that it is of, for the strategy `session`."""
    pass_parameters: list[str] = Field(default=[])
    """Names of parameters at the top of a request that are passed on beside those that the gateway knows
    (`docs/gateway.md`); requests with others are refused. A parameter that names a tenant, a cache, another server or
    code must not be among them."""
    media: bool = False
    """Whether messages may have parts other than text, such as images: engines fetch what their URLs name, from
    wherever they can reach. Set it where engines cannot reach what clients must not see (`--allowed-media-domains` in
    vLLM)."""
    tls_certificate: Path | None = None
    """Certificate chain, in PEM, of `listen`. Without, keys and prompts travel in the clear. Renewed files count from
    the next connection on."""
    tls_key: Path | None = None
    """The private key of `tls_certificate`, in PEM and not encrypted."""
    insecure: bool = False
    """Whether clients on other machines may connect without TLS. A gateway that listens on another address than a
    loopback one does not start without TLS unless this is true: behind something that ends TLS, or on a network that
    you trust."""
    max_connections: Annotated[int, Field(ge=1, le=60_000)] = 4096
    """Clients' connections. One more cuts the one that has been without a request for the longest time, or is refused
    where all have one. Each takes two open files and up to 500 KB of memory while its client is slow."""
    max_body_bytes: TierBytes = ByteSize(16 * 2**20)
    """The longest body of a request, 1 MiB or more; longer ones are answered with 413. With `tokenizer`, the texts of
    two requests at a time are tokenised, of 4 Mi characters each at most, which takes up to 170 times their length of
    memory."""
    max_bodies_bytes: TierBytes = ByteSize(256 * 2**20)
    """Bytes of bodies that the gateway holds at a time, of all requests; of one tenant half of it at most. Beyond that
    requests are answered with 429. Each takes some five times its length of memory while it is read, and up to thirty
    times where it is little but empty lists and objects."""
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Engines that a request is given to, one after the other, until one of them answers. Small: requests fail with
    the engine that they were given to. Large: a request that makes engines fail gets to more of them."""
    connect_timeout_s: Seconds = 2.0
    """How long an engine may take to accept a connection before another one is tried."""
    probe_interval_s: Annotated[float, Field(ge=0.05, le=3600)] = 1.0
    """Seconds between two looks at each engine's /health and /metrics. Small costs engines time, large lets a dead
    engine be tried, and loads be old."""
    probe_timeout_s: Seconds = 5.0
    """How long an engine may take to answer such a look, and a DNS to answer for `dns+`. Below what an engine takes
    that is merely busy, it gets no requests when it has most."""
    probe_failures: Count = 3
    """Looks in a row that fail until an engine counts as hung: requests that wait for it go to another one, and
    streams that it has begun end with an error."""
    resolve_interval_s: Seconds = 10.0
    """Seconds between two questions for the addresses of names with `dns+`."""
    request_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """The most time from the end of a request's body to the first byte of its answer, over all attempts."""
    send_timeout_s: Seconds = 60.0
    """How long a client may take no byte of its answer, or send no byte of its body, until its connection is cut."""
    shutdown_grace_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """What requests that are running at a stop get to finish; then they are cut."""
