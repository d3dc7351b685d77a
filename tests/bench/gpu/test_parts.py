"""`make gpu` as far as it goes without a GPU: figures, comparisons, time. Parts run in tiny size.

Those whose kernels the interpreter can do are in `tests/kernels/interpreted`.
"""

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from prometheus_client import CollectorRegistry

from kvtier.device.kv import Fence, HostMemoryKV
from kvtier.device.quantised import QuantisedHostKV
from kvtier.errors import KvtierError
from kvtier.memory.arena import Arena
from kvtier_bench.cases import first_token
from kvtier_bench.gpu import __main__ as command
from kvtier_bench.gpu.measuring import host_copies, launch_latency, timing
from kvtier_bench.gpu.measuring.comparing import WrongResultError, require_close, require_equal
from kvtier_bench.gpu.measuring.engine_steps import NeverIdle
from kvtier_bench.gpu.measuring.meanwhile import meanwhile
from kvtier_bench.gpu.measuring.rows import SHORT, Bar, case_of, failure, held_to, prefill_flops, row
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.measuring.shapes import TINY, dense, paged, sequence, unpaged
from kvtier_bench.gpu.measuring.timing import in_turns
from kvtier_bench.gpu.parts import copies as part_copies
from kvtier_bench.gpu.parts import decode as part_decode
from kvtier_bench.gpu.parts import prefill as part_prefill
from kvtier_bench.gpu.parts import spill as part_spill
from kvtier_bench.gpu.parts import ttft as part_ttft
from kvtier_bench.gpu.races.chip import Way
from kvtier_bench.gpu.run import child as child_module
from kvtier_bench.gpu.run.journal import Outcome
from kvtier_bench.gpu.run.parts import ALL, GRACE_S, PARTS, SECOND, TOTAL_S, part_of
from kvtier_bench.gpu.simulation.cuda import SimulatedCuda
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples


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
    assert case.detail == "1.2 TFLOP/s, 3 rounds"
    assert case.cpu_s_per_gib is None
    assert case_of(json.loads(json.dumps(asdict(case)))) == case


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


def test_budgets_are_for_nine_minutes() -> None:
    assert TOTAL_S + GRACE_S + 10 <= 540, "with ten seconds for the wheels"
    assert sum(part.budget_s for part in PARTS[:-1]) + GRACE_S < TOTAL_S, "some time is left for the last part"
    assert sum(part.budget_s for part in SECOND) <= TOTAL_S
    assert len({part.name for part in ALL}) == len(ALL)
    with pytest.raises(SystemExit):
        command.main(["prefil"])
    with pytest.raises(ValueError, match="prefil"):
        part_of("prefil")


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


@pytest.mark.parametrize("part", ["copies", "host-copies", "pages"])
def test_copies_in_tiny_size(part: str) -> None:
    cases = list(child_module.rows_of(part, 30, tiny=True))
    assert all(case.gb_per_s and case.ratio_to_floor for case in cases)
    floors = {"plain copy", "one copy"}
    assert all(case.ratio_to_floor == 1.0 for case in cases if case.name in floors)
    assert len({case.op for case in cases}) == {"copies": 1, "host-copies": 4, "pages": 4}[part]


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
    """Of memory that can be written, which is a failure."""
    answers = iter([True, True, False])
    monkeypatch.setattr(HostMemoryKV, "attach", lambda *_: next(answers))
    cases = {case.name: case for case in child_module.rows_of("pinning", 30, tiny=True)}
    assert cases["results"].detail == "FAILED: memory (anonymous) could not be pinned"
    assert cases["memfd, pinned"].rounds == 1


def test_launches_that_were_under_way_are_counted() -> None:
    launches = [(0.0, 1.0), (2.0, 1.5), (3.9, 0.2), (4.0, 9.0)]
    assert launch_latency.during(launches, 3.0, 4.0) == [1.5, 0.2]


def test_time_to_first_token_in_tiny_size() -> None:
    cases = {case.name: case for case in part_ttft.measure(tiny())}
    assert set(cases) == {"cold", "device", "host", "pool", "one pinned copy"}
    assert cases["host"].floor == "device"
    assert set(cases["pool"].beside) == {"one pinned copy"}
    assert 0 <= cases["pool"].figures["lent"] <= 1
    assert cases["cold"].gb_per_s is None


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


def test_parts_of_the_way_from_the_pool_are_switched_off() -> None:
    cases = {case.name: case for case in part_ttft.switches(tiny())}
    lent = {name: case.figures["lent"] for name, case in cases.items()}
    assert lent.keys() == {"as configured by default", "without direct reads", "without the tier process"}
    assert [lent[name] for name in ("without direct reads", "without the tier process")] == [0.0, 0.0]
    assert {case.floor for case in cases.values()} == {"as configured by default"}


def test_an_engine_has_two_steps_queued_at_all_times(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[int] = []
    notes: list[str] = []

    def step() -> None:
        queued.append(1)
        notes.append("step")

    class End:
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            assert len(queued) == 2, "another one runs when this one has ended"
            queued.pop()

        def elapsed_time(self, _later: object) -> float:
            return 1000.0

    monkeypatch.setattr("kvtier_bench.gpu.measuring.engine_steps._event", lambda _: End())
    fences = [Fence() for _ in range(4)]
    made, left = iter(fences), iter([True, True, False])
    engine = NeverIdle(tiny(), step, 0.0, lambda: next(made))
    engine.run_while(lambda: next(left), before=lambda: notes.append("load"), after=lambda: notes.append("save"))
    assert notes == ["load", "step", "step", "save", *["load", "step", "save"] * 2]
    assert engine.steps_s == [1.0, 1.0]
    assert engine.processed is fences[2], "a load waits for the step that has ended, not for the one under way"


def test_what_goes_on_meanwhile_is_under_way_and_ends() -> None:
    moves: list[int] = []

    def move() -> int:
        moves.append(1)
        return 10

    with meanwhile(move) as speed:
        assert moves
    assert speed.result() > 0
    with meanwhile(lambda: 1 // 0) as failing:
        pass
    with pytest.raises(ZeroDivisionError):
        failing.result()


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


def test_a_failure_is_a_failed_check() -> None:
    assert Outcome("prefill", 1.0, (failure("ours", "attention", "off by 1"),)).failed
    assert not Outcome("prefill", 1.0, (Case("ours", "attention"),)).failed


@pytest.mark.parametrize(
    ("bar", "words"),
    [
        (Bar("x one copy", 0.9, 0.9), "0.90 x one copy, bar >= 0.90: met"),
        (Bar("x one copy", 0.89, 0.9), f"0.89 x one copy, bar >= 0.90: {SHORT}"),
        (Bar("% slower", 5.1, 5.0, at_most=True), f"5.10 % slower, bar <= 5.00: {SHORT}"),
        (Bar("% slower", math.nan, 5.0, at_most=True), f"nan % slower, bar <= 5.00: {SHORT}"),
    ],
)
def test_rows_are_held_to_their_bars(bar: Bar, words: str) -> None:
    case = held_to(Case("ours", "copy", detail="1 GB/s"), bar, tiny=False)
    assert case.detail == f"1 GB/s; {words}"
    assert case.figures[f"{bar.what}: bar"] == bar.bound
    assert case.figures[f"{bar.what}: met"] == (SHORT not in words)
    assert held_to(case, bar, tiny=True) is case, "no figure of tiny size means anything"


@pytest.mark.parametrize(("num_rounds", "is_held"), [(1, False), (2, False), (3, True), (9, True)])
def test_a_median_of_few_rounds_is_held_to_nothing(num_rounds: int, is_held: bool) -> None:
    samples = Samples([0.002] * num_rounds, [0.002] * num_rounds)
    case = held_to(row("ours", "copy", samples), Bar("x one copy", 0.8, 0.9), tiny=False)
    assert (SHORT in case.detail) == is_held
    assert ("round" in case.detail) == (num_rounds < 9)


@pytest.mark.parametrize("measure", [part_prefill.measure, part_decode.plain])
def test_rows_for_which_there_is_no_time_are_named(measure: object) -> None:
    late = Setting(torch.device("cpu"), True, torch.float32, -1.0, clock=lambda: 0.0)
    cases = list(measure(late))  # type: ignore[operator]
    assert cases
    assert {(case.name, case.detail) for case in cases} == {("left out", "the time was over")}


def test_memory_that_is_not_pinned_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Arena(2, 64)) as arena:
        host_copies.require_pinned(tiny(), arena)
        monkeypatch.setattr(Setting, "on_cuda", property(lambda _: True))
        with pytest.raises(KvtierError, match="not pinned"):
            host_copies.require_pinned(tiny(), arena)


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
