"""Parts of `make gpu` as far as they go without a GPU, in tiny size.

Tests of kernels that the interpreter can run are in `tests/kernels/interpreted`.
"""

import pytest
import torch

from gpu_bench_rig import tiny
from kvtier.device.kv import HostMemoryKV
from kvtier.device.quantised import QuantisedHostKV
from kvtier_bench.gpu import __main__ as command
from kvtier_bench.gpu.measuring import host_copies
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.parts import decode as part_decode
from kvtier_bench.gpu.parts import prefill as part_prefill
from kvtier_bench.gpu.parts import spill as part_spill
from kvtier_bench.gpu.parts import ttft as part_ttft
from kvtier_bench.gpu.races.chip import Way
from kvtier_bench.gpu.run import child as child_module
from kvtier_bench.gpu.run.parts import ALL, GRACE_S, PARTS, SECOND, TOTAL_S, part_of
from kvtier_bench.gpu.simulation.cuda import SimulatedCuda


def test_budgets_are_for_nine_minutes() -> None:
    assert TOTAL_S + GRACE_S + 10 <= 540, "with ten seconds for the wheels"
    assert sum(part.budget_s for part in PARTS[:-1]) + GRACE_S < TOTAL_S, "some time is left for the last part"
    assert sum(part.budget_s for part in SECOND) <= TOTAL_S
    assert len({part.name for part in ALL}) == len(ALL)
    with pytest.raises(SystemExit):
        command.main(["prefil"])
    with pytest.raises(ValueError, match="prefil"):
        part_of("prefil")


@pytest.mark.parametrize("part", ["copies", "host-copies", "pages"])
def test_copies_in_tiny_size(part: str) -> None:
    cases = list(child_module.rows_of(part, 30, tiny=True))
    assert all(case.gb_per_s and case.ratio_to_floor for case in cases)
    floors = {"plain copy", "one copy"}
    assert all(case.ratio_to_floor == 1.0 for case in cases if case.name in floors)
    assert len({case.op for case in cases}) == {"copies": 1, "host-copies": 4, "pages": 4}[part]


def test_copies_beside_an_engine_in_tiny_size() -> None:
    cases = {case.name: case for case in child_module.rows_of("beside", 30, tiny=True)}
    assert {"loads on and on", "saves on and on", "to pinned memory", "from pinned memory"} < set(cases)
    assert cases["loads on and on"].figures.keys() == {"GB/s", "GB/s, idle engine", "% slower steps"}
    assert cases["loads on and on"].unit == "step"


def test_pinning_in_tiny_size() -> None:
    cases = list(child_module.rows_of("pinning", 30, tiny=True))
    for kind in ("memfd", "anonymous", "mapped for reading"):
        assert {f"{kind}, pinned", f"{kind}, unpinned"} <= {case.name for case in cases}
    launches = [case for case in cases if case.op.startswith("a small launch")]
    assert {case.op.split("in ")[1] for case in launches if "nothing else" in case.name} == {
        "this process", "another process"
    }  # fmt: skip


@pytest.fixture
def lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is mapped for reading cannot be pinned, as on many GPUs."""
    monkeypatch.setattr(host_copies, "pins_read_only", lambda _: False)
    monkeypatch.setattr(HostMemoryKV, "attach", lambda _, memory: memory.rows.flags.writeable)
    monkeypatch.setattr(QuantisedHostKV, "attach", lambda _, memory: memory.rows.flags.writeable)
    monkeypatch.setattr(SimulatedCuda, "pins_read_only", False)


@pytest.mark.usefixtures("lends_nothing")
@pytest.mark.parametrize("part", ["pages", "pinning", "races", "host-copies"])
def test_what_needs_no_lent_memory_is_measured_without(part: str) -> None:
    noted, *cases = child_module.rows_of(part, 60, tiny=True)
    assert noted.name == "lent memory"
    assert "does not pin what is mapped for reading" in noted.detail
    assert not [case.detail for case in cases if case.detail.startswith("FAILED")]
    assert len({case.op for case in cases}) == {"pages": 4, "pinning": 3, "races": len(Way), "host-copies": 4}[part]
    assert not [case.name for case in cases if case.name.startswith(("lent", "mapped"))]


def test_pinning_tells_what_was_measured_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that can be written must be pinned, so a refusal of it is a failure."""
    answers = iter([True, True, False])
    monkeypatch.setattr(HostMemoryKV, "attach", lambda *_: next(answers))
    cases = {case.name: case for case in child_module.rows_of("pinning", 30, tiny=True)}
    assert cases["results"].detail == "FAILED: memory (anonymous) could not be pinned"
    assert cases["memfd, pinned"].rounds == 1


def test_time_to_first_token_in_tiny_size() -> None:
    cases = {case.name: case for case in part_ttft.measure(tiny())}
    assert set(cases) == {"cold", "device", "host", "pool", "one pinned copy"}
    assert cases["host"].floor == "device"
    assert set(cases["pool"].beside) == {"one pinned copy"}
    assert 0 <= cases["pool"].figures["lent"] <= 1
    assert cases["cold"].gb_per_s is None


def test_parts_of_the_way_from_the_pool_are_switched_off() -> None:
    cases = list(part_ttft.switches(tiny()))
    lent = {case.name: case.figures["lent"] for case in cases if case.op.endswith("the pool")}
    others = {"verified on the host", "without direct reads", "without the tier process"}
    assert lent.keys() == {"as configured by default"} | others
    assert [lent[name] for name in ("without direct reads", "without the tier process")] == [0.0, 0.0]
    from_host = [case.name for case in cases if case.op.endswith("host memory")]
    assert from_host == ["as configured by default", "not by layer"]
    assert {case.floor for case in cases} == {"as configured by default"}


@pytest.mark.parametrize("measure", [part_prefill.measure, part_decode.plain])
def test_rows_for_which_there_is_no_time_are_named(measure: object) -> None:
    late = Setting(torch.device("cpu"), True, torch.float32, -1.0, clock=lambda: 0.0)
    cases = list(measure(late))  # type: ignore[operator]
    assert cases
    assert {(case.name, case.detail) for case in cases} == {("left out", "the time was over")}


def test_a_spill_that_fails_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    original, num_batches = part_spill._Spill.next_batch, 0

    def next_batch(self: part_spill._Spill) -> int:
        nonlocal num_batches
        num_batches += 1
        if num_batches > 1:
            raise RuntimeError("CUDA error: out of memory")
        return original(self)

    monkeypatch.setattr(part_spill._Spill, "next_batch", next_batch)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(part_spill.measure(tiny()))
