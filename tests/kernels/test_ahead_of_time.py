"""Every kernel, as its launcher would launch it, compiled for chips that are not here; and what launchers leave to it.

`launch_rig` records what the launchers pass, so that no signature is written down twice.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from kvtier_bench.gpu.resources.candidates import prefill_candidates  # noqa: E402
from kvtier_bench.gpu.resources.compiling import resources_of  # noqa: E402
from kvtier_kernels.attention import merge_states as merge_states_module  # noqa: E402
from kvtier_kernels.attention import paged_decode as paged_decode_module  # noqa: E402
from kvtier_kernels.attention import prefix_prefill as prefix_prefill_module  # noqa: E402
from kvtier_kernels.attention import shared_prefix_decode as shared_prefix_decode_module  # noqa: E402
from kvtier_kernels.attention.attention_batch import AttentionBatch  # noqa: E402
from kvtier_kernels.attention.paged_attention import attend_with_triton  # noqa: E402
from kvtier_kernels.attention.shared_prefixes import SharedPrefixes  # noqa: E402
from kvtier_kernels.scoring import PLAIN, Scoring  # noqa: E402
from kvtier_kernels.tiles import Tile, shared_limit_bytes  # noqa: E402
from launch_rig import SHARED_LIMIT_BYTES, Launch, compile_launch, recorded, triton_cache, usage_of  # noqa: E402
from sweeps import IN_FULL  # noqa: E402

CHIPS = [80, 90]
CHIP_IDS = ["sm_80", "sm_90"]
TOKENS_PER_BLOCK = 16
NUM_SEQS = 5


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton_cache(tmp_path_factory):
        yield


def attention_arguments(
    head_dim: int, dtype: torch.dtype, num_tokens: int, heads: int = 32, kv_heads: int = 8
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    kv = torch.empty((64, 3, 2, TOKENS_PER_BLOCK, kv_heads, head_dim), dtype=dtype)
    query = torch.empty((num_tokens, heads + 2 * kv_heads, head_dim), dtype=dtype)[:, :heads]
    tables, starts, lens = (torch.zeros(shape, dtype=torch.int64) for shape in ((NUM_SEQS, 20), 6, 5))
    return query, kv[:, 1], AttentionBatch(tables, starts, lens, scale=0.1)


def record_prefill(head_dim: int, dtype: torch.dtype, chip: int, **geometry: int) -> Launch:
    with recorded(prefix_prefill_module, divmod(chip, 10)) as launches:
        arguments = attention_arguments(head_dim, dtype, 300, **geometry)
        prefix_prefill_module.prefix_prefill(*arguments)
    (launch,) = launches
    return launch


def record_quantised_prefill(
    head_dim: int,
    kv_dtype: torch.dtype,
    chip: int,
    *,
    window: int | None = None,
    num_splits: int = 1,
    scoring: Scoring = PLAIN,
) -> Launch:
    """Queries of bfloat16; with int8 a scale per token and head, with float8 two."""
    query, kv_layer, batch = attention_arguments(head_dim, torch.bfloat16, 300)
    kv_layer = torch.empty((64, 3, *kv_layer.shape[1:]), dtype=kv_dtype)[:, 1]
    scales = {
        torch.int8: torch.empty((64, 3, *kv_layer.shape[1:4]))[:, 1],
        torch.float8_e4m3fn: torch.empty(2),
    }.get(kv_dtype)
    capability = divmod(chip, 10)
    with recorded(prefix_prefill_module, capability) as launches, recorded(merge_states_module, capability):
        batch = replace(batch, window=window, scoring=scoring)
        prefix_prefill_module.prefix_prefill(query, kv_layer, batch, scales, num_splits=num_splits)
    (launch,) = launches
    return launch


def record_decode(head_dim: int, dtype: torch.dtype, chip: int, **geometry: int) -> list[Launch]:
    """The kernel without splits, the kernel with splits, and the merge."""
    arguments = attention_arguments(head_dim, dtype, NUM_SEQS, **geometry)
    capability = divmod(chip, 10)
    with recorded(paged_decode_module, capability) as decodes, recorded(merge_states_module, capability) as merges:
        for num_splits in (1, 4):
            paged_decode_module.paged_decode(*arguments, num_splits=num_splits)
    assert (len(decodes), len(merges)) == (2, 1)
    return decodes + merges


def record_shared(head_dim: int, kv_dtype: torch.dtype, chip: int, window: int | None = None) -> list[Launch]:
    """The kernel for what sequences share, and that for what they do not; with a window, the latter as for decodes."""
    dtype = torch.bfloat16 if kv_dtype.itemsize == 1 else kv_dtype
    query, kv_layer, batch = attention_arguments(head_dim, dtype, NUM_SEQS)
    kv_layer = torch.empty((64, 3, *kv_layer.shape[1:]), dtype=kv_dtype)[:, 1]
    scales = torch.empty((64, 3, *kv_layer.shape[1:4]))[:, 1] if kv_dtype == torch.int8 else None
    batch = replace(batch, seq_lens=torch.full((NUM_SEQS,), 50), window=window)
    prefixes = SharedPrefixes.of(batch.block_tables, batch.seq_lens, TOKENS_PER_BLOCK)
    capability = divmod(chip, 10)
    with (
        recorded(shared_prefix_decode_module, capability) as shared,
        recorded(paged_decode_module, capability) as own,
        recorded(merge_states_module, capability),
    ):
        if window is None:
            sharing = replace(batch, prefixes=prefixes)
            shared_prefix_decode_module.shared_prefix_decode(query, kv_layer, sharing, scales)
        else:
            paged_decode_module.paged_decode(query, kv_layer, batch, scales)
    return shared + own


def compiled(launch: Launch, chip: int, folder: Path) -> str:
    """PTX. Shared memory is within the chip's limit, and no register is spilled."""
    kernel = compile_launch(launch, chip)
    usage = usage_of(kernel, folder)
    print(f"{launch.kernel.__name__} sm_{chip}: {kernel.metadata.shared:,} bytes shared, {usage}")
    assert kernel.metadata.shared <= SHARED_LIMIT_BYTES[chip]
    assert (usage.stack_bytes, usage.local_bytes) == (0, 0)
    ptx: str = kernel.asm["ptx"]
    return ptx


@pytest.mark.parametrize("chip", CHIPS, ids=CHIP_IDS)
@pytest.mark.parametrize("head_dim", [64, 128] if IN_FULL else [128])
def test_attention_compiles(head_dim: int, chip: int, tmp_path: Path) -> None:
    for launch in [record_prefill(head_dim, torch.bfloat16, chip), *record_decode(head_dim, torch.bfloat16, chip)]:
        ptx = compiled(launch, chip, tmp_path)
        if launch.kernel is not merge_states_module._merge_kernel:
            assert re.search(r"mma\.\S*sync|wgmma", ptx), "products must run on tensor cores"
            assert "cp.async" in ptx, "keys and values must be on their way before they are needed"


@pytest.mark.parametrize(
    ("head_dim", "dtype", "window", "chip"),
    [
        (128, torch.bfloat16, None, 80),
        (128, torch.bfloat16, None, 90),
        (256, torch.bfloat16, None, 90),
        (128, torch.bfloat16, None, 100),
        (64, torch.int8, None, 100),
        (128, torch.int8, None, 90),
        (128, torch.int8, 4096, 80),
        (64, torch.bfloat16, None, 90),
        (64, torch.bfloat16, None, 100),
        (128, torch.float8_e4m3fn, 4096, 80),
        (128, torch.float8_e4m3fn, 4096, 90),
        (128, torch.int8, 4096, 100),
    ][: 12 if IN_FULL else 7],
    ids=str,
)
def test_decodes_read_ahead_in_wide_loads(
    head_dim: int, dtype: torch.dtype, window: int | None, chip: int, tmp_path: Path
) -> None:
    """With a window, `paged_decode`; without, `shared_prefix_decode`, which has its kernel, too."""
    for launch in record_shared(head_dim, dtype, chip, window):
        ptx = compiled(launch, chip, tmp_path)
        assert re.search(r"mma\.\S*sync|wgmma|tcgen05", ptx), "products must run on tensor cores"
        assert re.search(r"cp\.async\.cg\S* \[.*0x10", ptx), "keys and values must be on their way, 16 bytes at a time"


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "window", "num_splits", "chip"),
    [
        (128, torch.bfloat16, None, 4, 90),
        (128, torch.bfloat16, 4096, 1, 90),
        (64, torch.float8_e4m3fn, None, 1, 90),
        (256, torch.int8, 4096, 1, 90),
        (128, torch.int8, 4096, 4, 80),
        (128, torch.bfloat16, 4096, 1, 100),
        (128, torch.float8_e4m3fn, None, 4, 100),
        (128, torch.int8, None, 1, 90),
        (64, torch.bfloat16, None, 1, 100),
        (256, torch.bfloat16, None, 1, 100),
    ][: 10 if IN_FULL else 7],
)
def test_prefills_read_ahead_in_wide_loads(
    head_dim: int, kv_dtype: torch.dtype, window: int | None, num_splits: int, chip: int, tmp_path: Path
) -> None:
    launch = record_quantised_prefill(head_dim, kv_dtype, chip, window=window, num_splits=num_splits)
    ptx = compiled(launch, chip, tmp_path)
    products = {80: r"mma\.\S*sync", 90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}[chip]
    assert re.search(products, ptx), "products must run on the chip's own matrix units"
    sizes = set(re.findall(r"cp\.async\.c[ag]\S* \[.*?\], \[.*?\], (0x\w+)", ptx))
    # For `mma.sync` Triton leaves values of one byte in groups of 8.
    assert sizes == ({"0x10", "0x8"} if chip == 80 else {"0x10"}), "keys and values must be on their way in wide loads"
    waits = {int(left) for left in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)}
    assert max(waits) >= 2, "keys and values of one more iteration must be on their way while one is computed"


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "window", "chip"),
    [
        (80, torch.bfloat16, 4096, 90),
        (256, torch.bfloat16, 4096, 90),
        (128, torch.bfloat16, 4096, 80),
        (64, torch.bfloat16, None, 100),
        (128, torch.bfloat16, None, 90),
        (128, torch.int8, None, 90),
        (256, torch.bfloat16, 4096, 100),
    ][: 7 if IN_FULL else 4],
)
def test_prefills_with_changed_scores_spill_nothing(
    head_dim: int, kv_dtype: torch.dtype, window: int | None, chip: int, tmp_path: Path
) -> None:
    scoring = Scoring(soft_cap=50.0, alibi_slopes=torch.empty(32), sinks=torch.empty(32))
    compiled(record_quantised_prefill(head_dim, kv_dtype, chip, window=window, scoring=scoring), chip, tmp_path)


def record_candidate(head_dim: int, tile: Tile) -> Launch:
    with recorded(prefix_prefill_module, (9, 0)) as launches:
        prefix_prefill_module.prefix_prefill(*attention_arguments(head_dim, torch.bfloat16, 300), tile=tile)
    (launch,) = launches
    return launch


def test_one_of_the_candidates_compiles() -> None:
    """All of them take seconds each; `benchmarks` times them on a GPU."""
    tile = random.Random(0).choice(prefill_candidates(128, 2, 4, (9, 0))[5:])
    assert compile_launch(record_candidate(128, tile), 90).metadata.shared <= tile.shared_bytes(128, 2)


@pytest.mark.parametrize(("head_dim", "place"), [(128, 1), (128, 2), (128, 3), (64, 1), (256, 1)])
def test_first_candidates_leave_room_for_another_program(head_dim: int, place: int) -> None:
    """Without spilling, and with products on the matrix units that run on their own."""
    tile = prefill_candidates(head_dim, 2, 4, (9, 0))[place]
    of = resources_of(record_candidate(head_dim, tile), 90, "", default=False)
    assert of.programs_per_multiprocessor >= 2, of
    assert (of.spilled_bytes, of.products.split()[1]) == (0, "wgmma"), of


@pytest.mark.parametrize(
    ("head_dim", "dtype", "chip"),
    [
        (128, torch.float32, 90),
        (256, torch.bfloat16, 90),
        (64, torch.float16, 80),
        (96, torch.bfloat16, 80),
        (256, torch.bfloat16, 80),
    ][: 5 if IN_FULL else 2],
)
def test_other_heads_fit_the_chip(head_dim: int, dtype: torch.dtype, chip: int, tmp_path: Path) -> None:
    for launch in [record_prefill(head_dim, dtype, chip), *record_decode(head_dim, dtype, chip)]:
        compiled(launch, chip, tmp_path)


@pytest.mark.parametrize("chip", [89, 120])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_fits_chips_with_less_shared_memory(head_dim: int, chip: int) -> None:
    kernel = compile_launch(record_prefill(head_dim, torch.bfloat16, chip), chip)
    assert kernel.metadata.shared <= SHARED_LIMIT_BYTES[chip]


@pytest.mark.parametrize(("heads", "kv_heads", "chip"), [(14, 2, 90), (71, 1, 90), (71, 1, 80)][: 3 if IN_FULL else 2])
def test_odd_groups_compile(heads: int, kv_heads: int, chip: int, tmp_path: Path) -> None:
    for launch in (
        record_prefill(64, torch.bfloat16, chip, heads=heads, kv_heads=kv_heads),
        *record_decode(64, torch.bfloat16, chip, heads=heads, kv_heads=kv_heads),
    ):
        compiled(launch, chip, tmp_path)


@pytest.mark.parametrize("chip", [80, 86, 90] if IN_FULL else [86])
@pytest.mark.parametrize(("heads", "head_dim"), [(128, 256), (256, 128)] if IN_FULL else [(128, 256)])
def test_wide_groups_take_no_more_shared_memory_than_foreseen(heads: int, head_dim: int, chip: int) -> None:
    for launch in (
        record_prefill(head_dim, torch.bfloat16, chip, heads=heads, kv_heads=1),
        record_decode(head_dim, torch.bfloat16, chip, heads=heads, kv_heads=1)[0],
    ):
        shared = compile_launch(launch, chip).metadata.shared
        assert shared <= launch.tile.shared_bytes(launch.arguments["COLUMNS"], 2) <= SHARED_LIMIT_BYTES[chip]


@pytest.mark.parametrize(("chip", "dtype"), [(90, torch.float32), (86, torch.bfloat16)], ids=["sm_90", "sm_86"])
def test_heads_that_do_not_fit_are_refused(chip: int, dtype: torch.dtype) -> None:
    for record in (record_prefill, record_decode):
        with pytest.raises(ValueError, match=f"of shared memory, a chip of {chip // 10}.{chip % 10} has"):
            record(256, dtype, chip, heads=256, kv_heads=1)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "chip"),
    [(64, torch.float32, 80), (128, torch.float32, 90), (256, torch.bfloat16, 90), (128, torch.float32, 100)],
)
def test_merges_compile(head_dim: int, dtype: torch.dtype, chip: int, tmp_path: Path) -> None:
    parts, part_lse = torch.empty((5, 8, 33, head_dim), dtype=dtype), torch.empty(5, 8, 33)
    out, lse = torch.empty((5, 8, head_dim), dtype=torch.bfloat16), torch.empty(5, 8)
    with recorded(merge_states_module, divmod(chip, 10)) as launches:
        merge_states_module.merge_states(parts, part_lse, out, lse)
    for launch in launches:
        ptx = compiled(launch, chip, tmp_path)
        assert re.search(r"ld\.global\S*\.v4\.b32", ptx), "parts must be read 16 bytes at a time"
        assert "bar.sync" in ptx


@pytest.mark.parametrize("by_default", [True, False])
def test_products_and_sums_are_fused_whatever_triton_does_by_itself(by_default: bool) -> None:
    with triton.knobs.language.scope():
        triton.knobs.language.default_fp_fusion = by_default
        for launch in record_decode(64, torch.bfloat16, 90):
            assert "fma.rn.f32" in compile_launch(launch, 90).asm["ptx"]


def test_batches_that_differ_share_compiled_kernels() -> None:
    """Compiling takes about a second: a new length must not do it in the middle of a step."""
    prefills, decodes, merges = set(), set(), set()
    for num_tokens, width, num_splits in ((NUM_SEQS + 1, 1, 2), (16, 16, 16), (2000, 21, 63)):
        query, kv_layer, batch = attention_arguments(64, torch.bfloat16, num_tokens)
        batch = replace(batch, block_tables=torch.zeros((NUM_SEQS, width), dtype=torch.int64))
        with recorded(prefix_prefill_module, (9, 0)) as launches:
            attend_with_triton(query, kv_layer, batch)
        prefills.add(compile_launch(launches[0], 90).hash)
        with recorded(paged_decode_module, (9, 0)) as launches, recorded(merge_states_module, (9, 0)) as merge_launches:
            paged_decode_module.paged_decode(query[:NUM_SEQS], kv_layer, batch, num_splits=num_splits)
        decodes.add(compile_launch(launches[0], 90).hash)
        merges.add(compile_launch(merge_launches[0], 90).hash)
    assert (len(prefills), len(decodes), len(merges)) == (1, 1, 1)


def test_batches_that_share_differently_share_compiled_kernels() -> None:
    """Whether they are few or many, in one group or in several."""
    hashes = set()
    for num_seqs, num_groups in ((2, 1), (7, 2), (64, 16)):
        query, kv_layer, *_ = attention_arguments(64, torch.bfloat16, num_seqs)
        tables = (torch.arange(num_seqs) % num_groups)[:, None].expand(-1, 4).contiguous()
        lens = torch.full((num_seqs,), 64)
        prefixes = SharedPrefixes.of(tables, lens, TOKENS_PER_BLOCK)
        assert prefixes.num_groups == num_groups
        batch = AttentionBatch(tables, None, lens, scale=0.1, prefixes=prefixes)
        with (
            recorded(shared_prefix_decode_module, (9, 0)) as launches,
            recorded(paged_decode_module, (9, 0)),
            recorded(merge_states_module, (9, 0)),
        ):
            shared_prefix_decode_module.shared_prefix_decode(query, kv_layer, batch)
        hashes.add(compile_launch(launches[0], 90).hash)
    assert len(hashes) == 1


def test_limits_are_those_of_the_guide() -> None:
    assert {chip: shared_limit_bytes(divmod(chip, 10)) for chip in SHARED_LIMIT_BYTES} == SHARED_LIMIT_BYTES
