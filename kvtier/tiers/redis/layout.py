"""Which server answers for which key: one for all, the one that Sentinels call master, or a Cluster's."""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from kvtier.clock import MONOTONIC
from kvtier.errors import InvalidInputError, KvtierError, UnavailableError
from kvtier.net.address import Address
from kvtier.tiers.redis.address import Kind, RedisAddress
from kvtier.tiers.redis.answers import ReplyError
from kvtier.tiers.redis.commands import command

AskOne = Callable[[Address, bytes, float], object]
"""Connects to one node, sends it a packed command and gives its answer, until a deadline (monotonic)."""

_NOBODY = 0xFFFF
"""Owner of a hash slot that has none."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Who answers for what, as of one moment."""

    nodes: tuple[Address, ...]
    """That may be written to."""
    owners: bytes | None = None
    """Of a Cluster: two bytes for each of its hash slots, the index of a node, little endian."""

    def grouped(
        self, names: Sequence[bytes], places: Sequence[int]
    ) -> tuple[list[tuple[Address, list[int]]], list[int]]:
        """`places` of `names` by the node to ask, each in order; and those that nobody serves."""
        if self.owners is None:
            return ([(self.nodes[0], list(places))] if places else []), []
        groups: dict[int, list[int]] = {}
        for place in places:
            at = 2 * key_slot(names[place])
            groups.setdefault(int.from_bytes(self.owners[at : at + 2], "little"), []).append(place)
        orphans = groups.pop(_NOBODY, [])
        return [(self.nodes[index], of_node) for index, of_node in groups.items()], orphans


def discover(address: RedisAddress, known: Sequence[Address], ask: AskOne, deadline: float) -> Layout:
    """Finds out. Blocks until `deadline` at most; raises as `ask` does.

    :param known: nodes of a Cluster that were there before: asked first, since seeds may be gone.
    """
    if address.kind is Kind.SINGLE:
        return Layout(address.seeds)
    failure: Exception = UnavailableError(f"nobody to ask at {address}")
    nodes = list(dict.fromkeys((*known, *address.seeds) if address.kind is Kind.CLUSTER else address.seeds))
    for i, node in enumerate(nodes):
        now = MONOTONIC()
        share = now + (deadline - now) / (len(nodes) - i)  # one that hangs leaves time for the others
        try:
            if address.kind is Kind.SENTINEL:
                question = command(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", address.service.encode())
                return Layout((_master(address, ask(node, question, share)),))
            return _slots(node, ask(node, command(b"CLUSTER", b"SLOTS"), share))
        except (OSError, redis.RedisError, KvtierError) as error:
            failure = error
    raise failure


def _master(address: RedisAddress, answer: object) -> Address:
    if answer is None:
        raise UnavailableError(f"the Sentinels know no service {address.service!r}")
    if not isinstance(answer, list) or len(answer) != 2:
        raise _unexpected(answer)
    host, port = answer
    try:
        return Address(host=host.decode(), port=int(port))
    except (AttributeError, TypeError, ValueError):
        raise _unexpected(answer) from None


def _slots(asked: Address, answer: object) -> Layout:
    """The primaries' ranges; replicas are behind them in each row."""
    if not isinstance(answer, list):
        raise _unexpected(answer)
    if not answer:
        raise UnavailableError("the Redis Cluster serves no hash slot yet")
    owners = bytearray(b"\xff" * 2 * REDIS_CLUSTER_HASH_SLOTS)
    nodes: dict[Address, int] = {}
    try:
        for first, last, (host, port, *_), *_ in answer:
            if not 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
                raise ValueError(f"slots {first} to {last}")
            # A node that does not know its own name leaves it out: it is the one that was asked.
            node = Address(host=host.decode() if host else asked.host, port=int(port))
            index = nodes.setdefault(node, len(nodes))
            owners[2 * first : 2 * last + 2] = index.to_bytes(2, "little") * (last + 1 - first)
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise _unexpected(answer) from None
    return Layout(tuple(nodes), bytes(owners))


def _unexpected(answer: object) -> KvtierError:
    if isinstance(answer, ReplyError):
        return answer.translated()
    return InvalidInputError(f"unexpected answer of the Redis: {reprlib.repr(answer)}")
