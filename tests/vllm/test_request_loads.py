"""Loads of requests, from their beginning to what vLLM is told of them. No engine."""

from typing import Any

from kvtier.identity.keys import BlockKey
from kvtier.offload import Block, JobResult
from kvtier.system.logs import current_request_id
from kvtier_vllm.kv.device_blocks import DeviceBlocks
from kvtier_vllm.kv.groups import KVGroups
from kvtier_vllm.requests.loads import RequestLoads
from kvtier_vllm.requests.traces import RequestTrace

GROUPS = KVGroups(1, 100)
BLOCKS: list[Block] = [(BlockKey(b"a"), 7), (BlockKey(b"b"), 9)]
DONE = JobResult(1, "load", frozenset(), ("host", "host"))


class FakeDirectory:
    """Its first job is 1."""

    def __init__(self) -> None:
        self.started: list[list[Block]] = []
        self.started_for: list[str] = []
        self.cancelled: list[int] = []

    def start_load(self, blocks: list[Block]) -> int:
        self.started.append(blocks)
        self.started_for.append(current_request_id())
        return len(self.started)

    def cancel(self, job_id: int) -> None:
        self.cancelled.append(job_id)


def _loading() -> tuple[RequestLoads, DeviceBlocks, FakeDirectory]:
    """A request's load is under way."""
    fake, device = FakeDirectory(), DeviceBlocks(GROUPS, 4)
    directory: Any = fake
    loads = RequestLoads(directory, GROUPS, device)
    loads.start("request", BLOCKS, RequestTrace(None))
    return loads, device, fake


def test_what_a_load_has_filled_may_be_saved() -> None:
    loads, device, fake = _loading()
    assert fake.started_for == ["request"], "lines of the log about it name the request"
    assert loads.end(DONE) == "request"
    assert device.is_seen(7)
    assert loads.take_loaded() == {"request"}
    assert loads.take_ended() == {}


def test_a_load_that_weights_have_overtaken_has_brought_nothing() -> None:
    """Though all of it has arrived: it is KV of the weights before."""
    loads, device, fake = _loading()
    device.forget_all()
    loads.cancel_all()
    assert fake.cancelled == [1]
    assert loads.end(DONE) == "request"
    assert not device.is_seen(7)
    assert loads.take_loaded() == set()
    assert loads.take_ended() == {"request": [7, 9]}
