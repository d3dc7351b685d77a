"""Which copies a step must wait for, and what ranks say together."""

from kvtier.offload.messages import Copied, LoadBatch, SaveBatch
from kvtier_vllm.kv.copies import CopiesUnderWay
from kvtier_vllm.kv.groups import KVGroups
from kvtier_vllm.messages import WorkerMetadata


def _save(batch_id: int, *device_slots: int) -> SaveBatch:
    slots = list(device_slots)
    return SaveBatch(batch_id, [], [bytes([slot]) for slot in slots], slots, slots)


def _copied(batch_id: int) -> Copied:
    return Copied(batch_id, b"\x01")


def test_a_block_is_awaited_until_every_rank_has_copied_it() -> None:
    copies = CopiesUnderWay(KVGroups(1, 1000))
    copies.num_ranks = 2
    copies.begin([_save(1, 10, 11), _save(2, 12)])
    assert copies.of([11, 12, 99]) == [1, 2]
    copies.end(0, [_copied(1), _copied(2)])
    assert copies.of([10, 12]) == [1, 2]
    copies.end(1, [_copied(1)])
    assert copies.of([10, 11]) == []
    assert copies.of([12]) == [2]
    assert copies
    copies.end(1, [_copied(2)])
    assert not copies


def test_loads_are_none_of_its_business() -> None:
    copies = CopiesUnderWay(KVGroups(1, 1000))
    copies.begin([LoadBatch(7, "host", [b"h"], [0], [10])])
    assert not copies
    assert copies.of([10]) == []


def test_a_block_that_is_saved_again_is_awaited_for_both() -> None:
    copies = CopiesUnderWay(KVGroups(1, 1000))
    copies.begin([_save(1, 10)])
    copies.begin([_save(2, 10)])
    assert 2 in copies.of([10])
    copies.end(0, [_copied(1)])
    assert copies.of([10]) == [2], "the first one's end took the second one's block"
    copies.end(0, [_copied(2)])
    assert not copies


def test_ranks_add_up_side_by_side() -> None:
    merged = WorkerMetadata({0: [b"a"]}).aggregate(WorkerMetadata({1: [b"b"]})).aggregate(WorkerMetadata({0: [b"c"]}))
    assert merged == WorkerMetadata({0: [b"a", b"c"], 1: [b"b"]})
