"""The simulator: the same every time, nothing lost, and strategies in the order that their authors publish."""

import functools
import json
from pathlib import Path

import pytest

from command_rig import run_command
from kvtier.errors import ConfigError
from kvtier.traces.form import Request, Trace
from kvtier_gateway.fleet.cases import Case, run_case
from kvtier_gateway.fleet.cli import simulate_fleet_command
from kvtier_gateway.fleet.figures import Summary
from kvtier_gateway.fleet.fleet import Fleet, Site
from kvtier_gateway.fleet.hardware import POOLS, EngineModel, PoolSpeed
from kvtier_gateway.fleet.kv_store import DeviceStore
from kvtier_gateway.fleet.workload import workload
from kvtier_gateway.routing.registry import make_strategy

BLOCK = 512


def conversations(num_sessions: int = 61, num_turns: int = 6) -> Trace:
    """Sessions with a system prompt of four blocks in common, whose turns each add eight blocks of their own."""
    requests = []
    for turn in range(num_turns):
        for session in range(num_sessions):
            own = [1000 + session * 100 + block for block in range(8 * (turn + 1))]
            keys = [0, 1, 2, 3, *own]
            at_s = 10.0 * turn + 7.919 * session % 10
            requests.append(Request(at_s, keys, len(keys) * BLOCK - 100, num_answer_tokens=50))
    return Trace("conversations", sorted(requests), 100_000, BLOCK)


@functools.cache
def simulated(strategy: str, pool: PoolSpeed) -> Summary:
    return run_case(conversations(), Case(strategy, 4, 2.0, pool), 1, lambda count: None)


def test_the_same_arguments_give_the_same_figures() -> None:
    simulated.cache_clear()
    first = simulated("priced", PoolSpeed.SLOW)
    simulated.cache_clear()
    assert simulated("priced", PoolSpeed.SLOW) == first


@pytest.mark.parametrize("strategy", ["round_robin", "priced"])
@pytest.mark.parametrize("pool", PoolSpeed)
def test_every_request_ends_and_no_memory_stays_in_use(strategy: str, pool: PoolSpeed) -> None:
    engine = EngineModel(device_bytes=64 * BLOCK * 131_072, host_bytes=100 * BLOCK * 131_072)
    work = workload(conversations(30, 4), engine.compute, seed=1)
    fleet = Fleet(Site(3, 0.9, POOLS[pool], engine), work, lambda _: make_strategy(strategy))
    fleet.run()
    assert all(request.first_token_s > request.arrives_s for request in work.requests)
    assert all(one.device.use == 0 and one.backlog_tokens == 0 for one in fleet.engines.values())
    assert all(one.backlog_s() == 0 for one in fleet.engines.values())


def test_one_engine_with_room_computes_every_block_once() -> None:
    trace = conversations(20, 4)
    summary = run_case(trace, Case("round_robin", 1, 0.3, PoolSpeed.NONE), 1, lambda count: None)
    whole = {key for request in trace.requests for key in request.keys[: (request.num_tokens - 1) // BLOCK]}
    parts = sum(request.num_tokens % BLOCK for request in trace.requests)
    assert summary.computed_tokens == pytest.approx(len(whole) * BLOCK + parts, rel=0.05)


class TestOrder:
    def test_without_a_pool_affinity_beats_turns(self) -> None:
        assert (
            simulated("precise", PoolSpeed.NONE).ttft_p90_s < 0.5 * simulated("round_robin", PoolSpeed.NONE).ttft_p90_s
        )

    def test_with_a_fast_pool_turns_compute_as_little_as_affinity(self) -> None:
        """Mooncake's finding: round robin over many engines, and hit rates as if there were one."""
        affinity, turns = simulated("session", PoolSpeed.FAST), simulated("round_robin", PoolSpeed.FAST)
        assert turns.computed_tokens < 1.1 * affinity.computed_tokens

    def test_one_common_head_makes_hashed_heads_and_trees_hot(self) -> None:
        even, hot = simulated("least_loaded", PoolSpeed.FAST), simulated("hash_trie", PoolSpeed.FAST)
        assert hot.max_over_mean_load > 2 * even.max_over_mean_load
        assert 1 <= even.least_max_over_mean_load <= even.max_over_mean_load

    @pytest.mark.parametrize("pool", PoolSpeed)
    def test_priced_is_no_worse_than_any_other(self, pool: PoolSpeed) -> None:
        priced = simulated("priced", pool)
        for other in ("precise", "epp", "session", "round_robin", "oracle"):
            for figure in ("ttft_p50_s", "ttft_p90_s"):
                assert getattr(priced, figure) <= 1.05 * getattr(simulated(other, pool), figure), (other, figure)

    def test_priced_spreads_its_load_where_there_is_a_pool(self) -> None:
        assert simulated("priced", PoolSpeed.FAST).max_over_mean_load <= 1.25


def test_a_device_evicts_what_is_free_for_longest_and_ends_of_prompts_first() -> None:
    device = DeviceStore(4)
    device.hold([], 3)
    assert device.fill([1, 2, 3]) == ([1, 2, 3], [])
    assert not device.fits(2)
    device.release([1, 2, 3], 0)
    assert device.hold([1], 2) == [3]
    assert device.run([1, 2, 3]) == 2


class TestCommand:
    @staticmethod
    def run(*arguments: str | Path) -> str:
        return run_command(simulate_fleet_command, *arguments).stdout

    @pytest.fixture
    def trace(self, tmp_path: Path) -> Path:
        path = tmp_path / "trace.jsonl"
        lines = [
            {"timestamp": 500 * i, "input_length": 1100 + i, "output_length": 9, "hash_ids": [1, 2 + i % 3, 100 + i]}
            for i in range(30)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def test_json_has_a_row_for_each_case(self, trace: Path) -> None:
        printed = json.loads(
            self.run(trace, "--engines", "2", "--strategy", "priced,radix", "--load", "0.5,0.9", "--json")
        )
        assert printed["trace"] == "trace.jsonl"
        rows = printed["results"]
        assert [(row["strategy"], row["load"]) for row in rows] == [
            (name, load) for load in (0.5, 0.9) for name in ("priced", "radix")
        ]
        assert set(rows[0]) == {
            *("strategy", "engines", "load", "pool", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
            *("max_over_mean_load", "least_max_over_mean_load", "fetched_bytes", "computed_tokens", "regret"),
        }
        assert rows[0]["regret"] is not None
        assert rows[1]["regret"] is None

    def test_it_prints_a_table_and_draws(self, trace: Path, tmp_path: Path) -> None:
        printed = self.run(trace, "--pool", "none,slow", "--plot", tmp_path / "p90.svg", "--seeds", "2")
        assert "8 engines, load 70%, slow pool" in printed
        assert "round_robin" in (tmp_path / "p90.svg").read_text()

    @pytest.mark.parametrize(
        ("option", "value", "says"),
        [
            ("--engines", "0", "--engines 0: name 1 or more"),
            ("--engines", "many", "--engines many"),
            ("--load", "-1", "--load -1: name above 0"),
            ("--pool", "quick", "--pool quick: name of none, slow and fast"),
            ("--strategy", "best", "strategy 'best' is none: name one of round_robin"),
        ],
    )
    def test_wrong_options_say_what_is_right(self, trace: Path, option: str, value: str, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            self.run(trace, option, value)

    def test_a_trace_without_lengths_is_refused(self) -> None:
        lengthless = Trace("recorded", [Request(0.0, [1], 0), Request(1.0, [2], 0)], 2, None)
        with pytest.raises(ConfigError, match="does not say how long its prompts are"):
            run_case(lengthless, Case("priced", 2, 0.5, PoolSpeed.NONE), 1, lambda count: None)
