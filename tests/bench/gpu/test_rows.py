"""Rows of `make gpu`: their figures, and the bars that they are held to."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from kvtier_bench.gpu.measuring.rows import SHORT, Bar, case_of, failure, held_to, prefill_flops, row
from kvtier_bench.gpu.run.journal import Outcome
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples


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
