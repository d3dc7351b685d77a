"""Several workers, and other connectors beside ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stepping_rank import BLOCK
from stepping_rig import Engine
from test_loads import MODES, fill, require_no_detour
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm_rig import settings

Start = Callable[..., Engine]
NUM_TOKENS = 6 * BLOCK + 5
_SAVED = {"KvtierConnector": {"counter\tkvtier_saved_blocks": 6}}


@MODES
def test_two_ranks_each_with_kv_of_its_own(start: Start, mode: dict[str, bool]) -> None:
    engine = start(num_ranks=2, **mode)
    for _ in range(2):
        for number in (1, 2):
            engine.ask(number, NUM_TOKENS)
        engine.finish()
        engine.forget_device()
    assert len(engine.received) == 2
    engine.require_right_answers()


@MODES
def test_a_block_that_one_rank_has_lost(start: Start, mode: dict[str, bool]) -> None:
    """It is computed by both."""
    fill(start, (1, NUM_TOKENS), num_ranks=2)
    engine = start(disk=True, num_ranks=2, **mode)
    _, disk = (rank.hold_disk() for rank in engine.ranks)
    request_id = engine.ask(1, NUM_TOKENS)
    disk.broken = {engine.hashes(request_id)[3]}
    engine.finish()
    assert engine.spared[request_id] == 3 * BLOCK
    assert engine.received == {request_id: 1}
    engine.require_right_answers()


@MODES
def test_a_rank_that_is_late(start: Start, mode: dict[str, bool]) -> None:
    """A load is over when every rank has it."""
    fill(start, (1, NUM_TOKENS), num_ranks=2)
    engine = start(disk=True, num_ranks=2, **mode)
    disk = engine.ranks[1].hold_disk()
    disk.gate.clear()
    request_id = engine.ask(1, NUM_TOKENS)
    engine.until(disk.entered.is_set, "the load is under way")
    for _ in range(20):
        engine.step()
    assert engine.is_loading(request_id)
    disk.gate.set()
    engine.finish()
    assert engine.spared[request_id] == 6 * BLOCK
    assert engine.received == {request_id: 1}
    engine.require_right_answers()


@MODES
def test_as_a_child_of_multi_connector(start: Start, tmp_path: Path, mode: dict[str, bool]) -> None:
    """Beside vLLM's example connector, which has nothing to offer; what is ours still is loaded and saved."""
    engine = start(transfer=beside(_example(tmp_path)), **mode)
    assert isinstance(engine.connector, MultiConnector)
    for _ in range(2):
        for number in (1, 2):
            engine.ask(number, NUM_TOKENS)
        engine.finish()
        engine.forget_device()
    assert len(engine.received) == 2
    engine.require_right_answers()


@MODES
@pytest.mark.parametrize("first", [False, True])
def test_a_load_is_over_in_the_same_round_there(
    start: Start, tmp_path: Path, first: bool, mode: dict[str, bool]
) -> None:
    """The results that its children may add to are one object."""
    engine = start(transfer=beside(_example(tmp_path), first=first), **mode)
    require_no_detour(engine)


def test_its_numbers_as_a_child_of_multi_connector(start: Start, tmp_path: Path) -> None:
    """As they come to the logger of vLLM's front end, which has no connector, only the configuration."""
    engine = start(transfer=beside(_example(tmp_path)))
    engine.ask(1, NUM_TOKENS)
    engine.finish()
    logger = KVConnectorLogging(engine.config.kv_transfer_config)
    stats = engine.connector.get_kv_connector_stats()
    logger.observe(stats.to_dict() if stats is not None else _SAVED)
    lines: list[str] = []
    logger.log(log_fn=lambda message, *values: lines.append(message % values))
    assert "saved_blocks" in lines[0]


def beside(*others: dict[str, Any], first: bool = False, **tables: Any) -> dict[str, Any]:
    """Ours and others, as `create_vllm_config` takes them.

    :param first: whether ours is the first one, not the last.
    :param tables: of our settings.
    """
    tables.setdefault("host", {"capacity_bytes": 400 * 256})
    ours = {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings(cache={"io_process": False}, **tables),
    }
    connectors = [ours, *others] if first else [*others, ours]
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}


def _example(folder: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder / "example")}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
