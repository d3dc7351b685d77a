"""What passes between the connector in vLLM's scheduler and those in its workers, with every step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtier_vllm.content.adapters import NO_SOURCE, AdapterSource


@dataclass(frozen=True, slots=True)
class WeightsState:
    """Which weights a worker computes with, since its last change of them."""

    generation: int
    """The worker adds one with everything that may change its weights, an adapter of its own or its device."""
    namespace: bytes | None
    """None: nobody knows the weights."""
    why: str
    """The reason why the weights are unknown; empty if they are known."""
    first_step: int = 0
    """The number of a step that has run with these weights, as have all after it. 0: none is known to."""


@dataclass
class WorkerIdentity(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once, when it knows its KV."""

    namespace: bytes
    block_bytes: int
    messages: list[bytes]
    """The encoded messages of its mover for the directory: what the tiers hold that are its own."""
    has_direct_loads: bool = True
    """Whether its device can copy from memory that it may only read, as a pool's is."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler tells every worker with each step."""

    messages: list[bytes] = field(default_factory=list)
    """Encoded messages of the directory that the mover is to get when the step's forward pass has been launched."""
    flush: list[int] = field(default_factory=list)
    """Save batches whose device blocks are written anew by this step: they must be copied before."""
    ended: dict[str, list[int]] = field(default_factory=dict)
    """Requests whose load is over, and which of their device blocks have not got their KV: vLLM hears of these from its
    workers alone. The scheduler's connector has already told it of a load that has brought everything."""
    is_empty: bool = False
    """No forward pass in this step."""
    number: int = 0
    """The step's number among those with a forward pass; 0 without one."""
    loads_after: int = 0
    """The step by whose start the device blocks to load to are not used any more; if unknown, it is this one."""
    generations: list[int] = field(default_factory=list)
    """The latest generation of each rank that the scheduler has heard of. What it sends belongs to these."""
    adapters: dict[int, AdapterSource] = field(default_factory=dict)
    """The adapters that the scheduler makes keys from since this step, by vLLM's id of the adapter."""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """What workers tell the scheduler with each step."""

    messages: dict[int, list[bytes]]
    """The encoded messages of each rank's mover, by rank."""
    step: int = 0
    """Number of the step that this comes with; 0 if it had no forward pass."""
    weights: dict[int, WeightsState] = field(default_factory=dict)
    """The state of weights that have changed since the rank last said so, by rank."""
    adapters: dict[int, AdapterSource] = field(default_factory=dict)
    """The adapters that were loaded since, by vLLM's id of the adapter."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Ranks differ, so nothing is added up: the directory waits for all of them itself."""
        assert isinstance(other, WorkerMetadata)
        merged = dict(self.messages)
        for rank, messages in other.messages.items():
            merged[rank] = merged.get(rank, []) + messages
        return WorkerMetadata(
            merged, max(self.step, other.step), self.weights | other.weights, _agreed(self.adapters, other.adapters)
        )


def _agreed(one: dict[int, AdapterSource], other: dict[int, AdapterSource]) -> dict[int, AdapterSource]:
    """What ranks have loaded. Nobody can tell the content of an adapter that they have not all loaded alike."""
    differ = {number: NO_SOURCE for number in one.keys() & other.keys() if one[number] != other[number]}
    return one | other | differ
