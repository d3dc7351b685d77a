"""The tables `[tenants.NAME]`: whose blocks there are, by which secrets, and what each tenant is owed."""

from typing import Annotated, Self

from pydantic import AwareDatetime, ByteSize, Field, model_validator

from kvtier.config.credentials import Tokens
from kvtier.config.fields import Bytes, SecretReference, Section, TierBytes


class ShareConfig(Section):
    """What one tenant is owed of a tier of the pool. What it does not use is lent to others until it asks for it."""

    guaranteed_bytes: Bytes = ByteSize(0)
    """Others cannot keep so much from the tenant. All guarantees together fit into the tier."""
    cap_bytes: Bytes | None = None
    """The most that the tenant may have, though there is room. What it has above a cap that was lowered goes at
    once; what is in use then goes as it writes. Left out: no such bound."""
    weight: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """How large its part is of what is not guaranteed, beside the weights of others. 0: it gives way to everybody."""

    @model_validator(mode="after")
    def _cap_above_guarantee(self) -> Self:
        if self.cap_bytes is not None and self.cap_bytes < max(1, self.guaranteed_bytes):
            raise ValueError("cap_bytes is below guaranteed_bytes, or 0; raise it or leave it out")
        return self


class RedisShareConfig(Section):
    """What one tenant may have of the Redis below the pools of a site. There are no guarantees there, but caps of all
    tenants that are three quarters of its `maxmemory` together are as good."""

    cap_bytes: TierBytes | None = None
    """The most that the tenant may have in all servers together, 1 MiB or more: its oldest blocks go first. Bytes of
    payloads before a codec, each rounded up to 4 KiB with its head. An eighth of it should hold many blocks, and more
    than the tenant writes in two seconds. All pools of the Redis need the same. Left out: no such bound."""


class PreviousSecretConfig(Section):
    """A secret that keyed the prefix chain before."""

    secret: SecretReference
    """`env:NAME` or `file:PATH` of it."""
    retire_at: AwareDatetime
    """It is not used from then on; with an offset, such as `2027-01-31T00:00:00Z`. Early: what has not been asked for
    since the rotation is lost. Late: whoever stole the secret may guess at names of blocks for so long, as before."""


class RateConfig(Section):
    """What one tenant may ask of a pool a second, over all its connections and calls. A request beyond that
    waits for a tenth of a second at most, and is answered with misses or THROTTLED then."""

    max_requests_per_s: Annotated[float, Field(ge=1, le=1e9)] | None = None
    """Requests of the block protocol, in shared memory as well, and calls of gRPC. As many may come at once after a
    quiet second. One that names more than about 500 blocks counts as several. Small: engines miss what is there; they
    ask some ten times for each request of their own. Left out: no such bound."""
    max_bytes_per_s: TierBytes | None = None
    """Payload bytes that are read and written, in shared memory as well, 1 MiB or more. A request is served as a
    whole, of up to 256 MiB, and what comes after it waits: well below an engine's batches (`batch_blocks`), most of
    what it asks for after one is a miss. Left out: no such bound."""


class TenantConfig(Section):
    """One tenant. Values of secrets are `env:NAME` or `file:PATH`, never the secret itself."""

    secret: SecretReference | None = None
    """The secret that keys the prefix chain, of 16 random bytes or more. Engines only: the pool must not have it."""
    previous_secrets: list[PreviousSecretConfig] = Field(default=[], max_length=4)
    """Secrets that `secret` has replaced, the newest first, 4 at the most. Blocks that no tier has under `secret` are
    looked for under these, loaded, and saved under `secret`: so a rotation loses nothing. Each costs a prompt that is
    not found whole one more lookup of a block. Without: a new secret forgets everything. Engines only."""
    salt: str = ""
    """Separates caches under one secret. Changing it forgets everything."""
    token: SecretReference | None = None
    """Bearer token for the cache pool. Engines only."""
    storage_keys: SecretReference | None = None
    """Keys that this tenant's blocks are sealed with on disk and in Redis: `env:NAME` or `file:PATH` of one or more
    `ID:KEY`, 64 hex digits a key. The largest id seals, all open. Pools, for their disk and Redis, and engines, for
    their own disk. Without: blocks are stored as they are. Needs `kvtier[seal]`. Pools read them again as tokens
    are, but for a tenant's first ones; engines do at their start."""
    storage_reads_plain: bool = False
    """Whether a tenant with `storage_keys` reads blocks that are not sealed, too. Set it for as long as blocks of
    before are worth more than being safe from somebody who can write to the disk or the Redis."""
    sealing_keys: SecretReference | None = None
    """Keys that engines seal this tenant's blocks with before they go to the pool, which must not have them: in the
    form of `storage_keys`. Engines only. Blocks that are not sealed are not read from the pool then. Change `salt` when
    you set it or take it out: until they are evicted, blocks of before keep the names that new ones need."""
    token_sha256: Tokens = Field(default=[])
    """Pool only: lower-case hex SHA-256 of each token that is accepted, as text or as `env:` / `file:`, or tables of
    `sha256` and `expires_at`. Read again when the file changes, and on SIGHUP."""
    certificate_names: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Pool only: DNS names and URIs, compared as they are. A client whose certificate has one of them among its subject
    alternative names needs no token. Needs `pool_service.tls_client_ca`. Read again as tokens are."""
    memory: ShareConfig = ShareConfig()
    """Pool only: what the tenant is owed of its memory. Read again as tokens are."""
    disk: ShareConfig = ShareConfig()
    """Pool only: what the tenant is owed of its disk. Read again as tokens are."""
    redis: RedisShareConfig = RedisShareConfig()
    """Pool only: what the tenant may have of its Redis. Read again as tokens are."""
    rate: RateConfig = RateConfig()
    """Pool only: what the tenant may ask for in a second. Read again as tokens are."""
