"""`kvtier simulate`: what is printed, what is written, and what wrong options are answered with."""

import json
from pathlib import Path

import pytest

from command_rig import run_command
from kvtier.cli.simulate.cli import simulate_command
from kvtier.errors import ConfigError
from kvtier.traces.records import Disguise, Kind, frame, header


def run(*arguments: str | Path) -> tuple[str, str]:
    """Standard output and standard error."""
    answer = run_command(simulate_command, *arguments)
    return answer.stdout, answer.stderr


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Two prompts in turn, of which a cache of three blocks keeps one."""
    path = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 1000 * turn, "input_length": 1100, "output_length": 1, "hash_ids": ids}
        for turn, ids in enumerate([[1, 2, 3], [4, 5, 6]] * 10)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """By a pool with room for two blocks of 1 KiB."""
    path, disguise = tmp_path / "pool.trace", Disguise()
    keys = [bytes([number]) * 64 for number in range(4)]
    content = header({"source": "pool", "policy": "lru", "capacity_bytes": 2048})
    for turn in range(10):
        content += disguise.record(Kind.LOOKUP, 100.0 * turn, b"tenant", 0, keys)
        content += disguise.record(Kind.WRITE, 100.0 * turn + 1, b"tenant", 1024, keys)
    path.write_bytes(frame(content))
    return path


def test_json_has_each_policy_at_each_capacity(mooncake: Path) -> None:
    output, errors = run(mooncake, "--policy", "lru,belady", "--capacity", "3,6", "--json")
    data = json.loads(output)
    assert data["trace"]["references"] == 60
    assert data["trace"]["ideal_block_hit_rate"] == 0.9
    assert [(r["policy"], r["capacity_blocks"], r["block_hit_rate"]) for r in data["results"]] == [
        ("lru", 3, 0.0),
        ("belady", 3, pytest.approx(27 / 60, abs=0.1)),
        ("lru", 6, 0.9),
        ("belady", 6, 0.9),
    ]
    lru = data["results"][2]
    assert (lru["prefix_hit_rate"], lru["token_hit_rate"], lru["writes"], lru["admission"]) == (0.9, 0.9, 6, None)
    assert data["results"][1]["prefix_hit_rate"] is None
    assert set(data["definitions"]) == {"block_hit_rate", "prefix_hit_rate", "token_hit_rate"}
    assert "Traceback" not in errors


def test_the_table_defines_what_it_shows_and_fits(mooncake: Path, tmp_path: Path) -> None:
    output, _ = run(mooncake, "--capacity", "1000000", "--plot", tmp_path / "out.svg")
    assert "an endless cache would have 90.0% of them" in " ".join(output.split())
    for words in ("1,000,000", "block hits: share", "prefix hits: share", "token hits: share", "belady"):
        assert words in output
    assert max(map(len, output.splitlines())) <= 80
    assert "1,000,000 blocks" in (tmp_path / "out.svg").read_text()


def test_twice_the_memory_of_a_recording(recorded: Path) -> None:
    output, _ = run(recorded, "--policy", "lru", "--json")
    data = json.loads(output)
    assert data["trace"]["recorded"] == {"policy": "lru", "capacity_blocks": 2}
    assert [(r["capacity_blocks"], r["block_hit_rate"], r["token_hit_rate"]) for r in data["results"]] == [
        (2, 0.45, None),
        (4, 0.9, None),
        (8, 0.9, None),
    ]
    (result,) = json.loads(run(recorded, "--policy", "lru", "--capacity", "4KiB", "--json")[0])["results"]
    assert result["capacity_blocks"] == 4


def test_tiers_are_shown_one_by_one(recorded: Path) -> None:
    options = ("--policy", "lru", "--tiers", "host=1,disk=2x", "--admission", "second-use")
    output, _ = run(recorded, *options)
    assert "host" in output
    assert "admission: second-use" in output
    assert max(map(len, output.splitlines())) <= 80
    (result,) = json.loads(run(recorded, *options, "--json")[0])["results"]
    assert [(tier["name"], tier["capacity_blocks"], tier["writes"]) for tier in result["tiers"]] == [
        ("host", 1, 80),
        ("disk", 4, 4),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "name capacities in blocks, e.g. --capacity 1000,10000: mooncake.jsonl does not say .* 6 distinct blocks"),
        (("--capacity", "2x"), "does not say under which capacity it was recorded"),
        (("--capacity", "1GiB"), "does not say how large a block is; add --block-bytes"),
        (("--capacity", "many"), "'many' is none: name blocks as in 5000"),
        (("--capacity", "0"), "'0' is less than one block"),
        (("--capacity", "5,"), "'' is none"),
        (("--capacity", "1KiB", "--block-bytes", "1MiB"), "'1KiB' is less than one block"),
        (("--capacity", "5", "--block-bytes", "big"), "--block-bytes big: name a size"),
        (("--capacity", "5", "--block-bytes", "0"), "name a size above 0"),
        (("--capacity", "5", "--tiers", "a=5"), "leave out --capacity"),
        (("--tiers", "5"), "tier '5' has no name or no capacity"),
        (("--capacity", "5", "--policy", "clock"), "no eviction policy 'clock': name one of default, lru"),
        (("--capacity", "5", "--admission", "third"), "no admission 'third'"),
        (("--capacity", "5", "--admission", "bytes-per-day:1TiB"), "add --block-bytes 2MiB"),
    ],
)
def test_wrong_options_are_answered_with_the_remedy(mooncake: Path, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(mooncake, *options)
