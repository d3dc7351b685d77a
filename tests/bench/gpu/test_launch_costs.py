"""What is planned once per step launches what checking every call does; and the benchmark of what that saves."""

import json

import pytest
import torch

pytest.importorskip("triton")

from kvtier_bench.gpu.resources import launch_costs
from kvtier_bench.gpu.resources.compiling import kernel_modules
from kvtier_kernels import AttentionBatch, SharedPrefixes
from kvtier_kernels.attention.layer_attention import step_with_triton
from kvtier_kernels.attention.paged_attention import attend_with_triton
from kvtier_kernels.writes.slot_write import write_slots
from launch_rig import Launch, recorded


def described(launch: Launch) -> object:
    """All that a launch is, without the addresses of what it computes into."""
    arguments = {
        name: (of.shape, of.stride(), of.dtype) if isinstance(of, torch.Tensor) else of
        for name, of in launch.arguments.items()
    }
    return launch.name, launch.grid, arguments, launch.options


@pytest.mark.parametrize(
    ("num_seqs", "new", "shared"),
    [(3, 1, False), (3, 1, True), (200, 1, False), (200, 1, True), (3, 5, False)],
    ids=["decode", "shared decode", "wide decode", "wide shared decode", "prefill"],
)
def test_later_layers_launch_what_every_call_by_itself_would(num_seqs: int, new: int, shared: bool) -> None:
    kv_layer = torch.empty((64, 2, 16, 8, 128), dtype=torch.bfloat16)
    rows = torch.empty((num_seqs * new, 48, 128), dtype=torch.bfloat16)
    query, key, value = rows[:, :32], rows[:, 32:40], rows[:, 40:]
    places = torch.zeros(num_seqs * new, dtype=torch.int64), torch.zeros(num_seqs * new, dtype=torch.int64)
    tables, lens = torch.zeros((num_seqs, 60), dtype=torch.int64), torch.full((num_seqs,), 900)
    starts = torch.arange(0, num_seqs * new + 1, new)
    prefixes = SharedPrefixes.of(tables, lens, 16) if shared else None
    batch = AttentionBatch(
        tables, starts, lens, scale=0.1, max_seq_len=900, num_keys=900 * num_seqs, prefixes=prefixes
    )  # fmt: skip
    with recorded(kernel_modules(), (9, 0)) as launches:
        write_slots(kv_layer, key, value, *places)
        attend_with_triton(query, kv_layer, batch)
        num_expected = len(launches)
        step = step_with_triton(places, batch)
        for _ in range(3):
            step(kv_layer, query, key, value)
    expected, *layers = [
        [described(launch) for launch in launches[first : first + num_expected]]
        for first in range(0, len(launches), num_expected)
    ]
    assert layers == [expected] * 3


def test_the_benchmark_has_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_costs.main(["--calls", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["cases"]
    assert len(rows) == 6
    assert all(row["p50_us"] > 0 and row["floor"] == "every call by itself" for row in rows)
