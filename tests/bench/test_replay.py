"""`kvtier bench replay`: what a real pool keeps of a trace is what the simulator says, whatever lengths and clients."""

import json
import random
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier_bench.cases.replay import bench_replay

MOST_POINTS = 0.02


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of a few turns that go on in turn: each request has all blocks of the one before, and some more."""
    rng = random.Random(3)
    conversations: list[list[int]] = []
    num_keys = 8
    lines = []
    for number in range(240):
        if rng.random() < 0.35 or not conversations:
            conversations.append(list(range(rng.choice([0, 4, 8]))))
        prompt = rng.choice(conversations[-40:])
        more = rng.randrange(2, 12)
        prompt += range(num_keys, num_keys + more)
        num_keys += more
        lines.append({"timestamp": number, "input_length": 512 * len(prompt) - 100, "hash_ids": list(prompt)})
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("memory", "disk", "sizes", "rates"),
    [
        ("16MiB", None, "4KiB,12KiB,28KiB", ("block_hit_rate", "prefix_hit_rate", "token_hit_rate")),
        ("4MiB", "24MiB", "16KiB", ("block_hit_rate",)),
    ],
    ids=["memory", "disk"],
)
def test_a_pool_hits_as_often_as_the_simulator_says(
    trace: Path, capsys: pytest.CaptureFixture[str], memory: str, disk: str | None, sizes: str, rates: tuple[str, ...]
) -> None:
    """Prefix hits of a disk are not held to it here: requests larger than a segment lose parts of their middle."""
    bench_replay(
        trace, memory=memory, disk=disk, policy="lru", sizes=sizes, clients=4, requests=None, warm_up=0.2, json=True
    )
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    figures = case["figures"]
    assert figures["num_refused"] == 0
    for rate in rates:
        assert 0.1 < figures[rate] < 0.9
        assert abs(figures[rate] - figures[f"simulated_{rate}"]) < MOST_POINTS, figures


def test_a_size_that_is_none_is_said_to_be(trace: Path) -> None:
    with pytest.raises(ConfigError, match="--sizes many: name a size"):
        bench_replay(trace, sizes="4KiB,many")
