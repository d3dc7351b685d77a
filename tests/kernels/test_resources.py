"""What kernels take of chips that are not here: as `docs/kernel-resources.md` says, and nothing is spilled."""

import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from kvtier_bench.gpu.resources import command as resources_module  # noqa: E402
from kvtier_bench.gpu.resources.candidates import decode_candidates  # noqa: E402
from kvtier_bench.gpu.resources.command import CHIPS, resources  # noqa: E402
from kvtier_bench.gpu.resources.compiling import Resources, kernel_modules, kernels_of  # noqa: E402
from kvtier_bench.gpu.resources.configurations import HEADS, configurations  # noqa: E402
from kvtier_bench.gpu.resources.occupancy import programs_per_multiprocessor  # noqa: E402
from kvtier_bench.gpu.resources.resource_table import COMMAND, PATH, row, rows, with_section  # noqa: E402
from kvtier_kernels.tiles import Tile, decode_tile, padded_head_dim, shared_limit_bytes  # noqa: E402
from launch_rig import triton_cache  # noqa: E402

SOME = Resources("_kernel", "one", "64x64 w4 s2", True, 90, 128, 0, 1000, 2000, "8 wgmma", 4, 4)


ROOT = Path(__file__).parents[2]
ALL = {int(chip) for chip in os.environ.get("KVTIER_TEST_ALL_KERNELS", "").split()}
"""Chips of which all kernels are compiled: all three in `make soak-kernels`; of others `FEW` are compiled."""
SHARES = [(chip, share) for chip in CHIPS for share in range(3 if chip in ALL else 1)]
FEW = {
    80: "^prefix_prefill heads 32/8x128$|^linear 4096 to 6144$|^block_copy rows of 1,048,576$",
    90: "^(prefix_prefill|paged_decode|shared_prefix_decode) heads 32/8x128$|^prefix_prefill heads 32/8x128 invariant$"
    "|^linear 4096 to 6144|^rms_norm of 4096$|^block_checksum parts of 65,536$",
    100: "^(prefix_prefill|paged_decode) heads 32/8x128$|^linear 4096 to 6144$|^kv_write$|^part_copy parts of 65,536$",
}


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton_cache(tmp_path_factory):
        yield


@pytest.mark.parametrize(("chip", "share"), SHARES)
def test_defaults_take_of_a_chip_what_the_table_says(chip: int, share: int) -> None:
    """And nothing is spilled. The table has a section for each Triton that tests run with."""
    every = chip in ALL
    names = [of.name for of in configurations() if every or re.search(FEW[chip], of.name)][share :: 3 if every else 1]
    found = resources([chip], only=f"^({'|'.join(map(re.escape, names))})$")
    assert {of.configuration for of in found} == set(names)
    too_much = [row(of) for of in found if of.is_too_much]
    assert not too_much, "defaults that spill, or do not fit: choose other tiles"
    listed = rows((ROOT / PATH).read_text(), triton.__version__, chip)
    assert listed is not None, f"{PATH} has no section for triton {triton.__version__}: {COMMAND}"
    missing = sorted({row(of) for of in found} - set(listed))
    assert not missing, f"not in {PATH}; write it with each Triton that it has: {COMMAND}"
    # What is listed beside these is of other kernels, or there no more.
    of_these = {line for line in listed if line.split(" | ")[1] in names}
    assert of_these == {row(of) for of in found}, f"no longer so; write it with each Triton that it has: {COMMAND}"


def test_the_table_has_every_default_of_every_chip() -> None:
    page = (ROOT / PATH).read_text()
    names = {of.name for of in configurations()}
    versions = re.findall(r"^## triton (\S+)$", page, flags=re.MULTILINE)
    assert len(versions) >= 2, "the oldest and the newest"
    for version, chip in itertools.product(versions, CHIPS):
        listed = rows(page, version, chip)
        assert listed is not None
        assert {line.split(" | ")[1] for line in listed} == names
        assert all(line.split(" | ")[5] == "0" for line in listed), "spilled"


def test_a_section_is_made_anew_beside_those_of_others() -> None:
    one, other = (replace(SOME, chip=chip) for chip in (80, 90))
    page = with_section(with_section("", "3.10.0", [one]), "3.6.0", [one, other, other])
    assert page.index("## triton 3.6.0") < page.index("## triton 3.10.0"), "oldest first"
    assert rows(page, "3.6.0", 90) == [row(other)], "once"
    assert rows(page, "3.10.0", 90) == []
    assert rows(page, "3.9.0", 90) is None
    changed = with_section(page, "3.6.0", [replace(one, registers=99)])
    assert rows(changed, "3.6.0", 80) == [row(replace(one, registers=99))]
    assert rows(changed, "3.10.0", 80) == [row(one)]
    assert with_section(changed, "3.6.0", [one, other]) == page


@pytest.mark.parametrize(
    ("chip", "registers", "num_warps", "shared_bytes", "tensor_columns", "expected"),
    [
        (90, 249, 8, 229_376, 0, 1),
        (90, 249, 4, 81_920, 0, 2),
        (90, 128, 8, 65_536, 0, 2),
        (90, 129, 8, 0, 0, 1),
        (90, 32, 4, 115_712, 0, 2),
        (90, 32, 4, 115_713, 0, 1),
        (90, 16, 1, 0, 0, 32),
        (80, 32, 16, 0, 0, 4),
        (120, 32, 16, 0, 0, 3),
        (100, 64, 4, 1000, 256, 2),
        (100, 64, 4, 1000, 512, 1),
        (80, 64, 4, 200_000, 0, 0),
    ],
)  # fmt: skip
def test_programs_at_a_time(
    chip: int, registers: int, num_warps: int, shared_bytes: int, tensor_columns: int, expected: int
) -> None:
    """115,712 bytes and 1 KiB of the system's are half of 228 KiB."""
    found = programs_per_multiprocessor(
        chip, registers=registers, num_warps=num_warps, shared_bytes=shared_bytes, tensor_columns=tensor_columns
    )
    assert found == expected


def test_writing_takes_all_of_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        resources_module.main(["--write", str(tmp_path / "page.md"), "--chip", "90"])


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
    for bad, status in (
        (replace(SOME, spilled_bytes=8), 1),
        (replace(SOME, spilled_bytes=8, default=False), 0),
        (replace(SOME, shared_bytes=SOME.shared_limit_bytes + 1), 1),
        (SOME, 0),
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
