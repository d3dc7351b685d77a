"""`kvtier bench flood` runs and reports: what it finds depends on the machine, what every run has to find does not."""

import json

import pytest

from kvtier.errors import KvtierError
from kvtier_bench.cases.flood import bench_flood


@pytest.mark.parametrize("apart", [False, True])
def test_a_flood_is_measured_and_leaves_nothing_behind(capsys: pytest.CaptureFixture[str], apart: bool) -> None:
    means = ["lengths", "connections", "events"]
    bench_flood(json=True, rounds=1, seconds=0.3, memory_mib=32, processes=2, means=means, apart=apart)
    report = json.loads(capsys.readouterr().out)
    for case in report["cases"]:
        figures = case["figures"]
        assert 0 < figures["hit_rate"] <= 1
        assert figures["num_reads"] > 0
        assert figures["burners_num_reads"] > 0
        assert figures["red_written_bytes"] > 0
        assert figures["red_connections"] > 0
        assert figures["red_streams"] > 0
    (served,) = [note for note in report["notes"] if "new clients are served" in note]
    assert served.startswith("held: ")


def test_means_that_are_none_are_named() -> None:
    with pytest.raises(KvtierError, match="no means shouting: there are lengths, "):
        bench_flood(means=["shouting"])
