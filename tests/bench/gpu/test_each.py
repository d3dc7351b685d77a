"""What goes wrong in one case of a part of `make gpu` takes no other with it."""

import importlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from kvtier_bench.gpu.measuring.comparing import WrongResultError
from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.gpu.run import child
from kvtier_bench.measuring.report import Case


class Cases:
    """Two that raise, one after a row, and a good one; each takes a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.setting = Setting(torch.device("cpu"), True, torch.float32, 30.0, clock=lambda: self.now)

    def wrong(self) -> Iterable[Case]:
        yield self.good()[0]
        raise WrongResultError("1 of 3 rows differ")

    def broken(self) -> Iterable[Case]:
        self.now += 1
        raise RuntimeError("out of memory")

    def good(self) -> list[Case]:
        self.now += 1
        return [Case("ours", "copy")]

    def rows(self) -> list[tuple[str, str, str]]:
        of = {"first": self.wrong, "second": self.broken, "third": self.good}
        return [(case.name, case.op, case.detail) for case in each(self.setting, of)]


def test_the_next_case_has_its_turn(capsys: pytest.CaptureFixture[str]) -> None:
    assert Cases().rows() == [
        ("ours", "copy", ""),
        ("results", "first", "FAILED: 1 of 3 rows differ"),
        ("results", "second", "FAILED: RuntimeError: out of memory"),
        ("ours", "copy", ""),
    ]
    said = capsys.readouterr().err
    assert "out of memory" in said
    assert "rows differ" not in said, "its row says it all"


def test_a_case_for_which_there_is_no_time_is_left_out() -> None:
    cases = Cases()
    cases.now = 28.5
    assert cases.rows()[-1] == ("left out", "third", "the time was over")


def test_nothing_goes_on_in_a_broken_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(_: Setting) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cases, seen = Cases(), list[Case]()
    monkeypatch.setattr(Setting, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        seen.extend(case for case in each(cases.setting, {"a": cases.broken, "b": cases.good}))
    assert cases.now == 1, "the second one was not begun"


@pytest.mark.parametrize(
    ("part", "module", "function", "others"),
    [
        ("pages", "pages", "host_copies", ["device to pinned host, fp8 records", "pinned host to device, fp8 records"]),
        ("host-copies", "copies", "_by_kernel", ["device to pinned host, by a kernel"]),
        ("copies", "copies", "_copy", ["device to device"]),
        ("beside", "beside", "_of_kind", ["beside steps of 1 ms"]),
        ("decode", "decode", "bandwidth", []),
        ("races", "races", "play", ["restore, simulated, direct", "restore, simulated, one by one"]),
        ("prefill", "prefill", "_subjects", ["prefill of 5 after 20"]),
        ("layers", "layers", "_timed", ["24 new tokens after 64"]),
    ],
)
def test_what_fails_in_a_part_is_not_the_end_of_it(
    part: str, module: str, function: str, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_part = importlib.import_module(f"kvtier_bench.gpu.parts.{module}")
    original, calls = getattr(of_part, function), []

    def fails_once(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        return original(*arguments, **options)

    monkeypatch.setattr(of_part, function, fails_once)
    cases = list(child.rows_of(part, 60, tiny=True))
    assert [case.detail for case in cases if case.name == "results"] == ["FAILED: RuntimeError: out of memory"]
    assert set(others) <= {case.op for case in cases}
