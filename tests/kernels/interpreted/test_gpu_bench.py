"""The parts of `make gpu` that launch kernels, in tiny size: what they measure beside what, not how fast it is."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.parts import decode as part_decode
from kvtier_bench.gpu.parts import layers as part_layers
from kvtier_bench.gpu.parts import prefill as part_prefill
from kvtier_bench.gpu.parts import spill as part_spill
from kvtier_bench.gpu.parts import step as part_step
from kvtier_bench.gpu.parts import sweep as part_sweep
from kvtier_bench.gpu.parts.sweep import _Candidate
from kvtier_bench.measuring.report import Case


def setting() -> Setting:
    return Setting.here(60, tiny=True)


def by_name(cases: list[Case]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.name, []).append(case)
    return found


def failures(cases: Iterable[Case], least: int = 0) -> list[str]:
    """What has failed, at least so many."""
    details = [case.detail for case in cases if case.detail.startswith("FAILED")]
    assert len(details) >= least
    return details


def test_prefill_beside_torch() -> None:
    cases = list(part_prefill.measure(setting()))
    found = by_name(cases)
    assert {"paged", "one block"} < set(found)
    assert [case.op for case in found["paged"]] == ["prefill of 9 after 0", "prefill of 5 after 20"]
    for case in found["paged"] + found["one block"]:
        assert case.floor is not None
        assert case.floor.startswith("torch ")
        assert case.figures["TFLOP/s"] > 0
        assert case.figures["difference from torch"] < 1e-5, "both attend to the same keys"


def test_decode_beside_the_bandwidth() -> None:
    found = by_name(list(part_decode.plain(setting())))
    (ours,), (floor,) = found["paged_decode"], found["bandwidth"]
    assert (ours.floor, floor.ratio_to_floor) == ("bandwidth", 1.0)
    assert ours.gb_per_s


def test_shared_prefixes_beside_decodes_that_share_nothing() -> None:
    found = by_name(list(part_decode.shared(setting())))
    (ours,), (floor,) = found["shared_prefix_decode"], found["paged_decode"]
    assert ours.floor == "paged_decode"
    assert ours.op == floor.op == "decode of 3 sequences, 32 keys shared, 8 each"
    assert ours.figures["difference"] < 1e-5


def test_steps_replayed_beside_steps_launched() -> None:
    found = by_name(list(part_step.measure(setting())))
    assert set(found) == {"launched", "replayed", "bandwidth"}
    assert [case.op for case in found["replayed"]] == [
        "decode step of 1 sequences, 24 keys each", "decode step of 3 sequences, 24 keys each",
    ]  # fmt: skip
    assert {case.floor for cases in found.values() for case in cases} == {"bandwidth"}


@pytest.mark.parametrize(("off", "is_wrong"), [(0.05, False), (0.2, True)])
def test_a_replay_may_be_rounded_otherwise_in_16_bits(
    off: float, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph splits sums by other numbers than a launch does, which differs by 4 to 5 % after all layers."""
    monkeypatch.setattr(part_step._Replay, "replay", _replay_off_by(off))
    cases = part_step.measure(replace(setting(), dtype=torch.bfloat16))
    assert any("replayed: off by" in detail for detail in failures(cases)) == is_wrong


def _replay_off_by(share: float) -> Callable[[part_step._Replay], None]:
    original = part_step._Replay.replay

    def replay(of: part_step._Replay) -> None:
        original(of)
        of.result.view(-1)[0] += share * of.result.abs().max()

    return replay


@pytest.mark.parametrize(("off", "is_wrong"), [(0.05, False), (0.2, True)])
def test_layers_that_come_one_by_one_may_be_rounded_otherwise_in_16_bits(
    off: float, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_alike = part_layers._Prefix.require_alike

    def off_by_it(prefix: part_layers._Prefix, expected: Tensor, ways: Any) -> None:
        expected = expected.clone()
        expected.view(-1)[0] += off * expected.abs().max()
        require_alike(prefix, expected, ways)

    monkeypatch.setattr(part_layers._Prefix, "require_alike", off_by_it)
    cases = part_layers.measure(replace(setting(), dtype=torch.bfloat16))
    assert any("logits: off by" in detail for detail in failures(cases)) == is_wrong


def test_a_replay_that_computes_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_step._Replay, "replay", lambda replay: replay.result.fill_(3.0))
    assert all("replayed: off by" in detail for detail in failures(part_step.measure(setting()), least=2))


def test_prefill_beside_a_spill() -> None:
    found = by_name(list(part_spill.measure(setting())))
    (beside,) = found["beside the spill"]
    assert beside.floor == "alone"
    assert beside.figures["GB/s spilled meanwhile"] > 0


def test_a_prefix_layer_by_layer() -> None:
    found = by_name(list(part_layers.measure(setting())))
    assert set(found) == {"load", "load by layer", "compute", "load, then compute", "layer by layer"}
    assert [case.op for case in found["layer by layer"]] == ["8 new tokens after 64", "24 new tokens after 64"]
    assert {case.floor for cases in found.values() for case in cases} == {"load, then compute"}
    assert all(case.gb_per_s for case in found["load"] + found["load by layer"])


@pytest.mark.parametrize("wrong", ["all", "a layer"])
def test_a_prefix_that_does_not_come_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = part_layers._Prefix.load

    def load(prefix: part_layers._Prefix) -> None:
        if wrong == "a layer":
            original(prefix)
            prefix.kv.layer(1)[:] = float("nan")

    monkeypatch.setattr(part_layers._Prefix, "load", load)
    assert all("logits: off by" in detail for detail in failures(part_layers.measure(setting()), least=2))


def test_a_sweep_goes_on_past_tiles_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, which the interpreter takes here, prefill has no candidates."""
    whole = part_sweep._decodes

    def failing(*arguments: Any) -> list[_Candidate]:
        default, first, *others = whole(*arguments)

        def fail() -> Tensor:
            raise RuntimeError("out of resource: shared memory")

        return [default, _Candidate(first.name, fail, fail), *others]

    monkeypatch.setattr(part_sweep, "_decodes", failing)
    *copies, first, second = part_sweep.measure(setting())
    assert [case.name for case in copies] == ["8 programs", "16 programs"]
    assert {case.op for case in copies} == {"sweep of programs beside host memory, default 2 programs"}
    assert first.detail == "failed: RuntimeError: out of resource: shared memory"
    assert second.op.startswith("sweep of tiles of decode, default ")
    assert second.floor == "the default"
