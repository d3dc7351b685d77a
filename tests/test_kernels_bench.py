"""`make gpu` as far as it goes without a GPU: figures, time, processes that fail, files. Parts run in tiny size.

Those whose kernels the interpreter can do are in `tests/interpreted`.
"""

import contextlib
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import torch

from kvtier.bench.report import Case
from kvtier.bench.rounds import Samples
from kvtier.errors import KvtierError
from kvtier.transfer import Arena
from kvtier_kernels_bench import __main__ as command
from kvtier_kernels_bench import child as child_module
from kvtier_kernels_bench import part_copies, part_decode, part_prefill, part_spill, timing
from kvtier_kernels_bench.parts import GRACE_S, PARTS, TOTAL_S, Part
from kvtier_kernels_bench.rows import disagreement, pack, prefill_flops, row, unpack
from kvtier_kernels_bench.runner import Outcome, run_parts
from kvtier_kernels_bench.setting import Setting
from kvtier_kernels_bench.shapes import TINY, dense, paged, unpaged
from kvtier_kernels_bench.timing import in_turns

ROOT = Path(__file__).parents[1]


def tiny(budget_s: float = 30.0) -> Setting:
    return Setting(torch.device("cpu"), True, torch.float32, budget_s, clock=lambda: 0.0)


@pytest.mark.parametrize(("new", "cached"), [(1, 0), (5, 0), (3, 7)])
def test_operations_are_those_that_the_mask_leaves(new: int, cached: int) -> None:
    seen = torch.ones(new, cached + new).tril(diagonal=cached).sum().item()
    assert prefill_flops(8, 16, new, cached) == 2 * 2 * 16 * 8 * seen


def test_rows_hold_what_was_measured() -> None:
    ours, floor = Samples([0.002, 0.004, 0.002], [0.002, 0.004, 0.002]), Samples([0.001] * 3, [0.001] * 3)
    case = row("ours", "copy", ours, floor=("plain", floor), round_bytes=4_000_000, figures={"TFLOP/s": 1.25, "x": 2.0})
    assert case.gb_per_s == pytest.approx(2.0)
    assert case.ratio_to_floor == pytest.approx(0.5)
    assert case.detail == "1.2 TFLOP/s"
    assert case.cpu_s_per_gib is None
    assert unpack(pack(case)) == case
    with pytest.raises(ValueError):
        unpack(pack(case)[:-20])


def test_turns_alternate_until_the_time_is_over() -> None:
    order: list[str] = []
    now = [0.0]

    def measured(run: object) -> float:
        now[0] += 1
        run()  # type: ignore[operator]
        return now[0]

    setting = Setting(torch.device("cpu"), True, torch.float32, 4.5, clock=lambda: now[0])
    samples = in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, setting, measured, rounds=100)
    assert order == ["a", "b"] * 4, "once to warm up; a third round had begun when the time was over"
    assert samples["a"].rounds_s == [1, 3, 5]
    assert samples["b"].calls_s == [2, 4, 6]


class EventsOfADevice:
    """`torch.cuda` as far as a clock takes it: a device that the host keeps waiting unless its head start is long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, launching_cycles: int) -> None:
        self.launching_cycles = launching_cycles
        self.slept: list[int] = []
        monkeypatch.setattr(torch.cuda, "_sleep", self.slept.append)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)
        monkeypatch.setattr(Setting, "on_cuda", property(lambda _: True))
        monkeypatch.setattr(timing, "_FLUSH_BYTES", 64)

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.slept[-1] < self.launching_cycles

    def synchronize(self) -> None: ...

    def elapsed_time(self, _end: object) -> float:
        return 1000.0 if self.query() else 2.0


def test_launching_is_not_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much head start as launching takes; for what waits for the device itself, none is enough."""
    device = EventsOfADevice(monkeypatch, launching_cycles=5_000_000)
    runs: list[int] = []
    clock = timing.DeviceClock(tiny())
    assert clock.seconds(lambda: runs.append(1)) == 2e-3
    assert clock.seconds(lambda: runs.append(1)) == 2e-3
    assert len(device.slept) == len(runs) == 2 + 1 + 1, "found once, then known"
    device.launching_cycles = 1 << 40
    assert clock.seconds(lambda: None) == 1.0


def test_without_a_gpu_only_tiny_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--tiny"):
        Setting.here(10, tiny=False)
    assert Setting.here(10, tiny=True).device.type == "cpu"
    monkeypatch.setattr(command, "machine_facts", lambda: {"device": None})
    assert command.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_budgets_are_for_eight_minutes() -> None:
    assert TOTAL_S + GRACE_S <= 480
    assert len({part.name for part in PARTS}) == len(PARTS)
    with pytest.raises(SystemExit):
        command.main(["prefil"])


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


@pytest.mark.parametrize("measure", [part_copies.on_device, part_copies.to_host])
def test_copies_in_tiny_size(measure: object) -> None:
    cases = list(measure(tiny()))  # type: ignore[operator]
    assert {case.payload_bytes for case in cases} == {4096, 1024}
    assert all(case.gb_per_s and case.ratio_to_floor for case in cases)
    floors = {"plain copy", "one copy"}
    assert all(case.ratio_to_floor == 1.0 for case in cases if case.name in floors)


def test_time_to_first_token_in_tiny_size() -> None:
    from kvtier_kernels_bench import part_ttft

    cases = {case.name: case for case in part_ttft.measure(Setting.here(60, tiny=True))}
    assert set(cases) == {"cold", "device", "host", "pool", "one pinned copy"}
    assert cases["host"].floor == "device"
    assert set(cases["pool"].beside) == {"one pinned copy"}
    assert cases["pool"].figures["x (device + one copy)"] > 0
    assert 0 <= cases["pool"].figures["lent"] <= 1
    assert cases["cold"].gb_per_s is None


CHILD = """
import sys, time
from importlib.metadata import distribution, distributions
from pathlib import Path
part, rows = sys.argv[1], Path(sys.argv[2])
line = Path(__file__).with_suffix(".row").read_text()
if part == "good":
    rows.write_text(line + "\\n" + line + "\\n")
    print("copies take several times as long", file=sys.stderr)
elif part == "crash":
    rows.write_text(line + "\\n")
    sys.exit("the device has fallen off the bus")
else:
    rows.write_text(line + "\\n" + line[:30])
    time.sleep(60)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    (tmp_path / "child_of_a_test.row").write_text(pack(Case("a", "b")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "child_of_a_test"


def test_a_part_that_fails_takes_no_other_with_it(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_kernels_bench.runner.GRACE_S", 1.0)
    parts = [Part("crash", 20), Part("hang", 2.0), Part("good", 20)]
    said: list[str] = []
    crash, hang, good = run_parts(parts, total_s=100, child=child, say=said.append)
    assert (crash.problem, crash.said) == ("exit status 1", "the device has fallen off the bus")
    assert len(crash.cases) == 1, "what it had given before"
    assert hang.problem.startswith("killed after")
    assert len(hang.cases) == 1, "but not half a row"
    assert (len(good.cases), good.problem, good.failed) == (2, "", False)
    assert good.said == "copies take several times as long"
    assert said[-1].strip() == good.said, "a warning is no problem, but is not lost"
    assert crash.failed
    assert said[0] == "[1/3] crash: at most 20 s"


def test_getting_ready_takes_of_a_parts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed a time after it was started, however long importing torch and opening the device took."""
    now = [0.0]

    def slow(start: float) -> float:
        now[0] += start
        return now[0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: min(0, slow(3.0)))
    assert Setting.here(20, tiny=True, clock=lambda: now[0]).left_s() == 17
    monkeypatch.setattr(child_module, "MONOTONIC", lambda: slow(1.0))
    monkeypatch.setattr(child_module, "_measure", lambda _: lambda setting: setting)
    monkeypatch.setattr(Setting, "here", lambda budget_s, *, tiny: budget_s)
    assert child_module.rows_of("copies", 20, tiny=True) == 19


def test_what_there_is_no_time_for_is_left_out(child: str) -> None:
    now = iter([0.0, 95.0])
    (outcome,) = run_parts([Part("good", 20)], total_s=100, child=child, say=str, clock=lambda: next(now))
    assert outcome.failed
    assert "time was over" in outcome.problem


def test_a_run_writes_table_and_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    assert command.main(["--tiny", "--json", str(path), "copies"]) == 0
    content = json.loads(path.read_text())
    (part,) = content["parts"]
    assert (part["part"], part["problem"], content["tiny"]) == ("copies", "", True)
    assert {case["name"] for case in part["cases"]} == {"block_copy", "plain copy"}
    assert {"device", "torch", "triton"} <= content["machine"].keys()
    assert date.fromisoformat(content["date"])
    out, err = capfd.readouterr()
    assert "block_copy" in out
    assert "no figure means anything" in out
    assert "[1/1] copies" in err


def test_what_failed_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "machine_facts", lambda: {"device": "a GPU"})
    torn = Case("selfcheck", "checks", detail="FAILED: kernel[/grid] of [red]")
    outcome = Outcome("checks", 1.0, (torn,), "exit status 1", said="list[/int]")
    monkeypatch.setattr(command, "run_parts", lambda *_, **__: iter([outcome]))
    assert command.main(["--json", str(tmp_path / "gpu.json"), "checks"]) == 1
    shown = "".join(capsys.readouterr().out.split())
    assert "list[/int]" in shown
    assert "kernel[/grid]" in shown.replace("│", "")


def test_results_that_differ_are_a_failed_check() -> None:
    assert list(disagreement("ours", "attention", 0.04, 1.0)) == []
    for difference in (0.06, float("nan")):
        (case,) = disagreement("ours", "attention", difference, 1.0)
        assert Outcome("prefill", 1.0, (case,)).failed


@pytest.mark.parametrize("measure", [part_prefill.measure, part_decode.plain])
def test_rows_for_which_there_is_no_time_are_named(measure: object) -> None:
    late = Setting(torch.device("cpu"), True, torch.float32, -1.0, clock=lambda: 0.0)
    cases = list(measure(late))  # type: ignore[operator]
    assert cases
    assert {(case.name, case.detail) for case in cases} == {("left out", "the time was over")}


def test_memory_that_is_not_pinned_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Arena(2, 64)) as arena:
        part_copies.require_pinned(tiny(), arena)
        monkeypatch.setattr(Setting, "on_cuda", property(lambda _: True))
        with pytest.raises(KvtierError, match="not pinned"):
            part_copies.require_pinned(tiny(), arena)


def test_a_spill_that_fails_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    num_moves = 0

    def move(self: object, start: int) -> int:
        nonlocal num_moves
        num_moves += 1
        if num_moves > 1:
            raise RuntimeError("CUDA error: out of memory")
        return 8

    monkeypatch.setattr(part_spill._Spill, "_move", move)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(part_spill.measure(tiny()))


def test_a_part_that_hangs_says_where(tmp_path: Path) -> None:
    script = """
import sys, time
from kvtier_kernels_bench import child
def hang(*_, **__):
    time.sleep(60)
child.rows_of, child.GRACE_S = hang, 0.2
child.main(["copies", sys.argv[1], "0.1"])
"""
    command = [sys.executable, "-c", script, str(tmp_path / "rows")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("in hang" in line for line in process.stderr)
        process.kill()
