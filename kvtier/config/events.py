"""The table of KV events."""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, ByteSize, model_validator

from kvtier.config.fields import Bytes, Count, Section
from kvtier.net.address import is_loopback


def _checked_endpoint(text: str) -> str:
    scheme, separator, place = text.partition("://")
    if not separator or scheme not in ("tcp", "ipc") or not place or (scheme == "tcp" and ":" not in place):
        raise ValueError(f"{text!r}: use tcp://HOST:PORT, such as tcp://127.0.0.1:5557, or ipc://PATH")
    return text


Endpoint = Annotated[str, AfterValidator(_checked_endpoint)]


class EventsConfig(Section):
    """KV events of kvtier's own engine, for routers: which blocks it has, in vLLM's format (`docs/kv-events.md`). Needs
    `kvtier[events]`."""

    endpoint: Endpoint | None = None
    """The address at which events are published (ZeroMQ, PUB): `tcp://127.0.0.1:5557`, or `ipc:///run/kvtier/events`.
    Left out: there are none, and ZeroMQ is not imported. Whoever reads them reads all tokens of prompts and answers."""
    replay_endpoint: Endpoint | None = None
    """The address at which subscribers ask for batches that they have missed (ZeroMQ, ROUTER). Left out: a subscriber
    that joins later learns of a block only when it comes anew."""
    insecure: bool = False
    """Whether an endpoint may be reached from other machines. ZeroMQ asks nobody for a password here, and encrypts
    nothing: for networks that you trust."""
    topic: str = ""
    """The first frame of each message: what subscribers filter by."""
    hashes: Literal["int64", "bytes"] = "int64"
    """How blocks are called: by the last 64 bits of their hash, as vLLM does and routers expect, or by all 32 bytes.
    The same blocks have the same hashes in all engines of a tenant with one secret."""
    queue_batches: Count = 4096
    """Batches that may wait for the publishing thread, and for each subscriber; a step of the engine has one at most.
    Small: a subscriber that stalls misses batches sooner, and asks for them again."""
    replay_bytes: Bytes = ByteSize(64 * 2**20)
    """Memory for batches that can be replayed, the newest ones. With 16 tokens per block, a block that comes and goes
    takes about 150 bytes."""

    @model_validator(mode="after")
    def _is_reached_from_here_only(self) -> Self:
        if self.endpoint is None and self.replay_endpoint is not None:
            raise ValueError("replay_endpoint repeats what is published: set endpoint, too")
        for key, endpoint in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint)):
            if endpoint is None or endpoint.startswith("ipc://") or self.insecure:
                continue
            host = urlsplit(endpoint).netloc.rpartition(":")[0].strip("[]")
            if not is_loopback(host):
                raise ValueError(
                    f"{key} {endpoint} tells other machines all tokens in the clear: listen on 127.0.0.1 or at ipc://, "
                    "or set insecure = true where you trust the network"
                )
        return self
