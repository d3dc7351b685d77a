"""The real mover and copies beside a busy engine, on a simulated GPU in virtual time: how long things take there.

Times are the model's, the same on every machine. Before, batches waited for a fence each, made when their turn came.
"""

import json
from functools import cache
from pathlib import Path

import pytest

from kvtier_bench.gpu import stream_model
from kvtier_bench.gpu.streams import cases
from kvtier_bench.gpu.streams.cases import LLAMA_8B, LLAMA_70B_RANK
from kvtier_bench.gpu.streams.devices import Fences
from kvtier_bench.gpu.streams.pace import Speeds
from kvtier_bench.gpu.streams.worker import Model

BUS = Speeds().bus_bytes_per_s
GIB = 1 << 30

load_from_host, load_from_pool = cache(cases.load_from_host), cache(cases.load_from_pool)
save_prefill, spill = cache(cases.save_prefill), cache(cases.spill)
"""The cases, each played once: in virtual time it takes the same course whenever it is played."""


@pytest.mark.parametrize(("step_s", "before_s"), [(0.015, 0.25), (0.06, 1.0), (0.25, 4.25)])
def test_a_load_waits_for_the_engine_once_or_not_at_all(step_s: float, before_s: float) -> None:
    """8B, 16k tokens, from host memory."""
    before, at_submit, at_processed = (
        load_from_host(LLAMA_8B, num_tokens=16_384, step_s=step_s, fences=fences).seconds for fences in Fences
    )
    assert before == pytest.approx(before_s, rel=0.05)
    assert 2 * step_s < at_submit < 2 * step_s + 0.08, "the running step, and the queued one"
    assert at_processed < 0.08


def test_a_load_of_8_gib() -> None:
    """8B, 64k tokens: no slower beside long steps than beside short ones."""
    short, long = (
        load_from_host(LLAMA_8B, num_tokens=65_536, step_s=step_s, fences=Fences.AT_PROCESSED_STEP).seconds
        for step_s in (0.06, 0.25)
    )
    assert long == pytest.approx(short, rel=0.02)
    assert BUS / 2 < 8 * GIB / long <= BUS


def test_a_load_from_the_pool() -> None:
    """70B on eight ranks, 16k tokens, lent."""
    before, at_submit, at_processed = (
        load_from_pool(LLAMA_70B_RANK, num_tokens=16_384, step_s=0.25, fences=fences).seconds for fences in Fences
    )
    assert before > 2
    assert at_submit < 0.55
    assert at_processed < 0.05


@pytest.mark.parametrize("fences", [Fences.AT_SUBMIT, Fences.AT_PROCESSED_STEP])
def test_the_planner_hears_of_the_tier_alone(fences: Fences) -> None:
    """Not of the engine's steps, which a load waits for."""
    times = [
        load_from_host(LLAMA_8B, num_tokens=16_384, step_s=step_s, fences=fences).told_s for step_s in (0.015, 0.25)
    ]
    assert times[0] == pytest.approx(times[1], rel=0.01)
    assert 2 * GIB / BUS < times[0] < 0.08


@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_70B_RANK], ids=lambda model: model.name)
def test_saves_keep_up_with_a_prefill(model: Model) -> None:
    """What has not been saved is of the step that runs and of the one that has just ended, however long it goes on."""
    rates = [
        save_prefill(model, tokens_per_s=30_000, step_s=0.25, num_steps=num_steps, fences=Fences.AT_SUBMIT)
        for num_steps in (6, 12)
    ]
    assert [rate.num_dropped for rate in rates] == [0, 0]
    assert [rate.steps_behind for rate in rates] == [2, 2]
    before = save_prefill(model, tokens_per_s=30_000, step_s=0.25, num_steps=12, fences=Fences.AT_ITS_TURN)
    assert (before.steps_behind or 0) > 8


@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_70B_RANK], ids=lambda model: model.name)
def test_a_backlog_is_saved_at_half_of_the_bus_or_more(model: Model) -> None:
    rate = spill(model, num_bytes=4 * GIB, step_s=0.25, fences=Fences.AT_SUBMIT)
    assert BUS / 2 <= rate.gb_per_s * 1e9 <= BUS


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above have played its cases; the long loads have a test of their own."""
    monkeypatch.setattr(stream_model, "_LONG_TOKENS", 16_384)
    monkeypatch.setattr(stream_model, "_NUM_STEPS", 12)
    for case in (load_from_host, load_from_pool, save_prefill, spill):
        monkeypatch.setattr(stream_model, case.__name__, case)
    assert stream_model.main(["--json", str(tmp_path / "rows.json")]) == 0
    written = json.loads((tmp_path / "rows.json").read_text())
    assert len(written) == 6 * len(Fences) + 4 * 2
    shown = capsys.readouterr().out
    assert all(row["case"].split(",")[0] in shown for row in written)
