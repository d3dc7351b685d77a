"""What kernels take of chips that are not here: nothing is spilled where it matters, and the report says so."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

from kvtier_kernels.tiles import Tile, decode_tile, padded_head_dim, shared_limit_bytes  # noqa: E402
from kvtier_kernels_bench import resources as resources_module  # noqa: E402
from kvtier_kernels_bench.candidates import decode_candidates  # noqa: E402
from kvtier_kernels_bench.compiling import kernel_modules, kernels_of  # noqa: E402
from kvtier_kernels_bench.configurations import HEADS, configurations  # noqa: E402
from kvtier_kernels_bench.resources import Resources, resources  # noqa: E402


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "triton")
        yield


@pytest.mark.parametrize("operation", ["prefix_prefill heads 32/8x128$", "paged_decode heads 32/8x128$", "merge_two"])
def test_attention_of_common_models_spills_nothing_on_sm_100(operation: str) -> None:
    """Beside sm_80 and sm_90, which `test_kernels_ahead_of_time.py` looks at more closely."""
    found = resources([100], only=operation)
    assert found
    for of in found:
        assert of.spilled_bytes == 0, of
        assert of.shared_bytes <= of.shared_limit_bytes, of


@pytest.mark.parametrize("operation", ["kv_write$", "block_copy rows of 1,048,576", "part_copy parts of 65,536"])
def test_copies_spill_nothing_on_sm_100(operation: str) -> None:
    found = resources([100], only=operation)
    assert found
    assert all(of.spilled_bytes == 0 for of in found)


def test_the_command_reports_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "resources.json"
    assert resources_module.main(["--chip", "90", "--only", "block_copy rows of 51", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["triton"] == triton.__version__
    (row,) = content["kernels"]
    assert (row["chip"], row["default"], row["spilled_bytes"]) == (90, True, 0)
    assert row["registers"] > 0
    assert "sm_90" in capsys.readouterr().out


def test_a_default_that_spills_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spilling = Resources("k", "c", True, 90, 255, 1000, 2000, 8, 4)
    for bad, status in (
        (spilling, 1),
        (Resources("k", "c", False, 90, 255, 1000, 2000, 8, 4), 0),
        (Resources("k", "c", True, 90, 255, 3000, 2000, 0, 4), 1),
        (Resources("k", "c", True, 90, 255, 1000, 2000, 0, 4), 0),
    ):
        monkeypatch.setattr(resources_module, "resources", lambda *_, bad=bad, **__: [bad])
        assert resources_module.main([]) == status
    assert "8 spilled" in capsys.readouterr().out


def test_every_kernel_is_reported() -> None:
    launched = {launch.kernel.fn for of in configurations() for launch in of.record(90)}
    there = {kernel.fn for module in kernel_modules() for kernel in kernels_of(module).values()}
    assert launched == there


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0)])
@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (64, 7), (256, 8)])
def test_candidates_fit_the_chip(capability: tuple[int, int], head_dim: int, group: int) -> None:
    chosen = decode_tile(head_dim, 2, group, capability)
    candidates = decode_candidates(head_dim, 2, group, capability)
    assert candidates[0] == chosen
    assert len(set(candidates)) == len(candidates) > 5
    for tile in candidates:
        assert tile.shared_bytes(padded_head_dim(head_dim), 2) <= shared_limit_bytes(capability)
        assert tile.rows == chosen.rows


def test_nearest_candidates_come_first() -> None:
    chosen, *others = decode_candidates(128, 2, 4, (9, 0))

    def changed(tile: Tile) -> int:
        return sum(getattr(tile, name) != getattr(chosen, name) for name in ("keys", "num_warps", "num_stages"))

    assert [changed(tile) for tile in others[:4]] == [1] * 4
    assert changed(others[-1]) == 3


def test_candidates_are_configurations_too() -> None:
    names = [of.name for of in configurations(candidates=2) if not of.default]
    assert len(names) == 2 * 2 * len(HEADS)
    (candidate,) = [of for of in configurations(candidates=1) if of.name == "paged_decode heads 32/8x128 candidate 1"]
    (launch,) = candidate.record(90)
    default = decode_tile(128, 2, 4, (9, 0))
    assert launch.tile != default
