"""What `make gpu` measures with: settings, batches, comparisons, pinned memory, and settled blocks."""

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from prometheus_client import CollectorRegistry

from gpu_bench_rig import tiny
from kvtier.errors import KvtierError
from kvtier.memory.arena import Arena
from kvtier_bench.cases import first_token
from kvtier_bench.gpu import __main__ as command
from kvtier_bench.gpu.measuring import host_copies
from kvtier_bench.gpu.measuring.comparing import WrongResultError, require_close, require_equal
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.measuring.shapes import TINY, dense, paged, sequence, unpaged
from kvtier_bench.gpu.parts import copies as part_copies


def test_without_a_gpu_only_tiny_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--tiny"):
        Setting.here(10, tiny=False)
    assert Setting.here(10, tiny=True).device.type == "cpu"
    monkeypatch.setattr(command, "machine_facts", lambda: {"device": None})
    assert command.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_batches_are_what_they_say() -> None:
    """Paged, in one block and dense, the keys are the same; shared ones are the very same blocks."""
    setting = tiny()
    batch = paged(setting, TINY, num_seqs=1, new=5, cached=40, tokens_per_block=16)
    query, key, value = dense(batch)
    assert query.shape == (1, TINY.num_heads, 5, TINY.head_dim)
    for position in (0, 17, 44):
        block, offset = batch.block_tables[0, position // 16], position % 16
        assert torch.equal(key[0, :, position], batch.kv_layer[block, 0, offset])
        assert torch.equal(value[0, :, position], unpaged(batch, 64).kv_layer[0, 1, position])
    together = paged(setting, TINY, num_seqs=3, new=1, cached=39, tokens_per_block=16, shared=32)
    tables = together.block_tables
    assert (tables[:, :2] == tables[0, :2]).all()
    assert len(set(tables[:, 2].tolist()) | set(tables[0, :2].tolist())) == 5
    assert together.seq_lens.tolist() == [40] * 3
    last = sequence(together, 2)
    assert torch.equal(last.query, together.query[2:])
    assert (last.query_starts.tolist(), last.seq_lens.tolist()) == ([0, 1], [40])
    assert torch.equal(last.block_tables, tables[2:])


def test_block_copies_are_compared_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gibibytes on the device would take seconds to the host and more to compare there."""
    rows = torch.arange(24, dtype=torch.uint8).view(6, 4)
    moved: list[torch.device] = []
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("a tensor of the device was copied to the host"))
    monkeypatch.setattr(
        torch.Tensor, "to", lambda of, where, **options: moved.append(where) or to(of, where, **options)
    )
    setting = tiny()
    part_copies._copy(setting, rows, torch.tensor([5, 1]), torch.zeros(4, 4, dtype=torch.uint8), torch.tensor([0, 2]))
    assert set(moved) == {setting.device}


@pytest.mark.parametrize("left_s", [0.2, 30.0])
def test_blocks_that_are_never_written_do_not_take_all_the_time(left_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, now = AnEngineThatWaits(), 0.0

    def clock() -> float:
        nonlocal now
        now += 0.1
        return now

    monkeypatch.setattr(first_token, "MONOTONIC", clock)
    asking = first_token.FirstToken(engine, CollectorRegistry(), lambda: left_s)  # type: ignore[arg-type]
    asking.settle()
    asking._num_computed = 7
    with pytest.raises(KvtierError, match="0 of 7 blocks were written"):
        asking.settle()
    assert now < min(left_s, 10.0) + 0.6


class AnEngineThatWaits:
    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            pass


def test_comparisons() -> None:
    rows = torch.arange(12, dtype=torch.uint8).view(3, 4)
    require_equal("rows", rows, rows.clone())
    wrong = rows.clone()
    wrong[2, 3] ^= 1
    with pytest.raises(WrongResultError, match="1 of 3 rows differ, the first is row 2"):
        require_equal("rows", wrong, rows)
    with pytest.raises(WrongResultError, match="instead of"):
        require_equal("rows", rows[:2], rows)
    numbers = torch.linspace(-1, 1, 9)
    assert require_close("numbers", numbers + 5e-5, numbers) == pytest.approx(5e-5, rel=0.01)
    for off in (2e-4, math.nan):
        with pytest.raises(WrongResultError, match="off by"):
            require_close("numbers", numbers + off, numbers)
    require_close("numbers", (numbers + 0.01).bfloat16(), numbers)


def test_memory_that_is_not_pinned_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Arena(2, 64)) as arena:
        host_copies.require_pinned(tiny(), arena)
        monkeypatch.setattr(Setting, "on_cuda", property(lambda _: True))
        with pytest.raises(KvtierError, match="not pinned"):
            host_copies.require_pinned(tiny(), arena)
