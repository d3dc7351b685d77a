"""The kernels that move KV, as their launchers would launch them, compiled for chips that are not here."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

triton = pytest.importorskip("triton")

from kvtier_kernels.copies import block_checksum as block_checksum_module  # noqa: E402
from kvtier_kernels.copies import quantised_copy, row_copy  # noqa: E402
from kvtier_kernels.copies.block_checksum import block_checksum  # noqa: E402
from kvtier_kernels.copies.block_copy import block_copy  # noqa: E402
from kvtier_kernels.copies.copy_tiles import CHAIN_TILE, copy_tile, quantise_tile  # noqa: E402
from kvtier_kernels.copies.part_copy import Parts, part_copy  # noqa: E402
from kvtier_kernels.records import LossyCodec, RecordLayout  # noqa: E402
from kvtier_kernels.writes import slot_write  # noqa: E402
from launch_rig import compile_launch, recorded, triton_cache, usage_of  # noqa: E402

CHIPS = [80, 90, 100]
CHIP_IDS = ["sm_80", "sm_90", "sm_100"]
WIDE_LOAD, WIDE_STORE = r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton_cache(tmp_path_factory):
        yield


def compiled(module: ModuleType, launch: Callable[[], object], chip: int, folder: Path, *, most_registers: int) -> str:
    """PTX of the one kernel that `launch` launches. Nothing is spilled."""
    with recorded(module, divmod(chip, 10)) as launches:
        launch()
    (recording,) = launches
    kernel = compile_launch(recording, chip)
    usage = usage_of(kernel, folder)
    print(f"{recording.kernel.__name__} sm_{chip}: {kernel.metadata.shared:,} bytes shared, {usage}")
    assert (usage.stack_bytes, usage.local_bytes) == (0, 0)
    assert usage.registers <= most_registers
    ptx: str = kernel.asm["ptx"]
    return ptx


def assert_ieee(ptx: str) -> None:
    """What is rounded is rounded as torch does on CPU: subnormals too, and quotients to nearest."""
    assert ".ftz" not in ptx
    assert not re.search(r"div\.(full|approx)|rcp\.", ptx)


@pytest.mark.parametrize("chip", CHIPS, ids=CHIP_IDS)
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("part_bytes", [2**16 + 16, 4096 + 16])
def test_layers_move_in_wide_accesses(
    part_bytes: int, gather: bool, chip: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside host memory: 16 warps of 64 registers leave half of a multiprocessor's registers to others."""
    monkeypatch.setattr(row_copy, "copy_tile", lambda unit, size, host: copy_tile(unit, size, host=True))
    kv, staging = torch.empty((4, 3, part_bytes), dtype=torch.uint8), torch.empty((3, 5, part_bytes), dtype=torch.uint8)
    index = torch.zeros(3, dtype=torch.int64)
    ptx = compiled(
        row_copy,
        lambda: part_copy(Parts.of(kv.unbind(1)), index, staging, index, gather=gather),
        chip, tmp_path, most_registers=64,
    )  # fmt: skip
    assert len(re.findall(WIDE_LOAD, ptx)) == len(re.findall(WIDE_STORE, ptx)) == 8
    assert not re.search(r"st\.global\.b(8|16|32) ", ptx), "all of it in wide accesses"


@pytest.mark.parametrize("chip", CHIPS, ids=CHIP_IDS)
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(
    ("codec", "head_dim", "dtype", "host"),
    [
        (LossyCodec.INT8, 128, torch.bfloat16, False),
        (LossyCodec.FP8, 128, torch.bfloat16, True),
        (LossyCodec.FP8, 80, torch.float16, False),
    ],
)
def test_pages_are_quantised_in_wide_accesses(
    codec: LossyCodec, head_dim: int, dtype: torch.dtype, host: bool, gather: bool, chip: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(quantised_copy, "quantise_tile", lambda dim, **_kwargs: quantise_tile(dim, host=host))
    layout = RecordLayout(codec, dtype, head_dim, 2 * 16 * 8)
    kv = torch.empty((4, 3, layout.page_bytes), dtype=torch.uint8)
    staging = torch.empty((3, 5, layout.record_bytes), dtype=torch.uint8)
    index = torch.zeros(3, dtype=torch.int64)
    ptx = compiled(
        quantised_copy,
        lambda: quantised_copy.quantised_copy(
            Parts.of(kv.unbind(1)), index, staging, index, layout=layout, gather=gather
        ),
        chip, tmp_path, most_registers=128,
    )  # fmt: skip
    assert re.search(WIDE_LOAD, ptx)
    assert re.search(WIDE_STORE, ptx)
    assert_ieee(ptx)


def test_layers_and_numbers_that_differ_share_compiled_kernels() -> None:
    """Compiling takes about a second: a new length must not do it in the middle of a step."""
    copies = set()
    for num_layers, num_blocks, max_programs in ((1, 1, 1), (16, 16, 16), (33, 21, 5)):
        kv = torch.empty((64, num_layers, 2**16), dtype=torch.uint8)
        staging = torch.empty((num_layers, num_blocks, 2**16), dtype=torch.uint8)
        index = torch.zeros(num_blocks, dtype=torch.int64)
        with recorded(row_copy, (9, 0)) as launches:
            part_copy(
                Parts.of(kv.unbind(1)), index, staging, index,
                gather=False, max_programs=max_programs,
            )  # fmt: skip
        copies.add(compile_launch(launches[0], 90).hash)
    assert len(copies) == 1


@pytest.mark.parametrize("chip", CHIPS[:2], ids=CHIP_IDS[:2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_kv_write_compiles(dtype: torch.dtype, chip: int, tmp_path: Path) -> None:
    """Rows of a fused projection."""
    kv_layer, rows = torch.empty((64, 3, 2, 16, 8, 128), dtype=dtype)[:, 1], torch.empty((7, 48, 128), dtype=dtype)
    index = torch.zeros(7, dtype=torch.int64)

    def launch() -> None:
        slot_write.write_slots(kv_layer, rows[:, :8], rows[:, :8], index, index)

    ptx = compiled(slot_write, launch, chip, tmp_path, most_registers=64)
    assert re.search(r"ld\.global\S*\.v[24]\.b", ptx)
    assert re.search(r"st\.global\S*\.v[24]\.b", ptx)


@pytest.mark.parametrize("chip", CHIPS[:2], ids=CHIP_IDS[:2])
@pytest.mark.parametrize(("row_bytes", "wide"), [(2**20 + 16, True), (2**20 + 8, False), (51, False)])
def test_block_copy_compiles(row_bytes: int, wide: bool, chip: int, tmp_path: Path) -> None:
    """Rows of an odd number of 16 bytes too move in accesses of 16 bytes."""
    blocks, staging = (torch.empty((4, row_bytes), dtype=torch.uint8) for _ in range(2))
    index = torch.zeros(3, dtype=torch.int64)

    def launch() -> None:
        block_copy(blocks, index, staging, index)

    ptx = compiled(row_copy, launch, chip, tmp_path, most_registers=192)
    assert bool(re.search(WIDE_LOAD, ptx)) == bool(re.search(WIDE_STORE, ptx)) == wide


def test_checksums_keep_much_in_flight(tmp_path: Path) -> None:
    """A program of one warp has 4 KiB in flight: 16 of them at a time ask a multiprocessor's share of the bandwidth."""
    kv, index = torch.empty((3, 4, 2**16), dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    with recorded(block_checksum_module, (9, 0)) as launches:
        block_checksum([Parts.of(kv.unbind())], index, torch.empty((3, 11), dtype=torch.int64))
    sums, chain = (compile_launch(launch, 90) for launch in launches)
    for kernel in (sums, chain):
        usage = usage_of(kernel, tmp_path)
        assert (usage.stack_bytes, usage.local_bytes) == (0, 0)
        assert usage.registers <= 128
    loop = chain.asm["ptx"].split("$L__BB")
    assert max(part.count("ld.global") for part in loop) >= CHAIN_TILE.ahead, "loads that wait for no scramble"


def test_checksums_of_all_sizes_share_compiled_kernels() -> None:
    kernels = set()
    for num_checked, part_bytes, prefix_words in ((1, 256, 0), (16, 2**16, 16), (3, 248, 1)):
        kv, index = torch.empty((3, 4, part_bytes), dtype=torch.uint8), torch.zeros(num_checked, dtype=torch.int64)
        with recorded(block_checksum_module, (9, 0)) as launches:
            block_checksum([Parts.of(kv.unbind())], index, torch.empty((num_checked, prefix_words), dtype=torch.int64))
        kernels.update(compile_launch(launch, 90).hash for launch in launches)
    assert len(kernels) == 2


@pytest.mark.parametrize("chip", CHIPS[:2], ids=CHIP_IDS[:2])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(("part_bytes", "wide"), [(2**16 + 16, True), (2**16 + 8, False)])
def test_part_copy_compiles(part_bytes: int, wide: bool, gather: bool, chip: int, tmp_path: Path) -> None:
    kv, staging = (torch.empty(shape, dtype=torch.uint8) for shape in ((3, 4, part_bytes), (4, 3 * part_bytes)))
    index = torch.zeros(3, dtype=torch.int64)

    def launch() -> None:
        part_copy(Parts.of(kv.unbind()), index, staging, index, gather=gather)

    ptx = compiled(row_copy, launch, chip, tmp_path, most_registers=64)
    assert bool(re.search(WIDE_LOAD, ptx)) == bool(re.search(WIDE_STORE, ptx)) == wide
