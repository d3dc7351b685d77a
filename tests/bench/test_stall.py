"""`kvtier bench stall` runs and reports: what it finds depends on the machine, what every run has to find does not."""

import json

import pytest

from kvtier.errors import KvtierError
from kvtier.offload import Hierarchy
from kvtier_bench.cases.stall import bench_stall


def test_an_engine_beside_garbage_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    poll = Hierarchy.poll
    bench_stall(json=True, pairs=1, prompt_tokens=48, answer_tokens=4, only=["garbage"], threads=1)
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    figures = case["figures"]
    assert case["name"] == "garbage"
    assert figures["num_pieces_hurt"] > 0
    assert figures["num_steps"] >= 4
    assert 0 < figures["calls_p50_us"] <= figures["calls_p999_us"] <= figures["calls_max_us"]
    assert figures["step_ratio"] > 0
    assert Hierarchy.poll is poll


def test_states_that_are_none_are_named() -> None:
    with pytest.raises(KvtierError, match="no state sleepy: there are healthy, black hole, "):
        bench_stall(only=["sleepy"])
