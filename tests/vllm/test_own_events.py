"""The KV events of kvtier's own engine are byte for byte those that vLLM makes, and its classes decode them."""

from pathlib import Path

import msgspec
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from kvtier_engine.events.event_form import END_OF_REPLAY

FIXTURE = Path(__file__).parents[1] / "golden" / "kv_events.hex"
"""What `tests/engine/test_kv_events.py` packs."""
GROUP, KIND = 0, "full_attention"


def test_vllm_makes_the_same_bytes() -> None:
    batch = KVEventBatch(
        ts=1764000000.25,
        events=[
            AllBlocksCleared(),
            BlockStored(
                [2**64 - 1, 7], None, [1, 2, 300, 70_000], 2, None, MEDIUM_GPU, None,
                group_idx=GROUP, kv_cache_spec_kind=KIND,
            ),
            BlockStored(
                [b"\x01" * 32], b"\x02" * 32, [5, 6], 2, None, MEDIUM_STORAGE, None,
                group_idx=GROUP, kv_cache_spec_kind=KIND, locality="LOCAL",
            ),
            BlockRemoved([7], MEDIUM_GPU, group_idx=GROUP),
            BlockRemoved([b"\x01" * 32], MEDIUM_STORAGE, group_idx=GROUP, locality="LOCAL"),
        ],
        data_parallel_rank=0,
    )  # fmt: skip
    ours = bytes.fromhex(FIXTURE.read_text())
    made = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    for event in made[1]:
        assert event.pop("lookahead_token_ids", None) is None, "vLLM 0.33 names it; who decodes takes it for None"
    assert msgspec.msgpack.encode(made) == ours
    assert msgspec.msgpack.decode(ours, type=KVEventBatch) == batch
    assert END_OF_REPLAY == ZmqEventPublisher.END_SEQ
