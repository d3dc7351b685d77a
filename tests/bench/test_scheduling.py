"""`kvtier bench scheduling` names what there is; that it serves needs a real model, and is left to who measures."""

import random

import pytest

from kvtier.errors import KvtierError
from kvtier_bench.cases.scheduling import bench_scheduling
from kvtier_bench.measuring.workloads import WORKLOADS


def test_workloads_that_are_none_are_named() -> None:
    with pytest.raises(KvtierError, match="no workload with sleepy in its name: there are 12 conversations"):
        bench_scheduling(only=["sleepy"])


def test_the_same_seed_gives_the_same_prompts_which_share_prefixes() -> None:
    for workload in WORKLOADS.values():
        first = [turn.prompt for turn in workload.turns(random.Random(3), 1000)]
        assert first == [turn.prompt for turn in workload.turns(random.Random(3), 1000)]
        heads = {tuple(prompt[:100]) for prompt in first}
        assert len(heads) < len(first)
