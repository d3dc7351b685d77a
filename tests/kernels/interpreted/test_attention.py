"""`prefix_prefill` and `paged_decode` in the interpreter, against the reference: odd sizes, poisoned memory."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_rig import (
    CASES,
    SCORINGS,
    Case,
    Inputs,
    kernel_error_bound,
    lse_error_bound,
    make_inputs,
    quantised,
    scored,
    windowed,
)
from kvtier_kernels import paged_attention_reference
from kvtier_kernels.attention import paged_decode as paged_decode_module
from kvtier_kernels.attention import prefix_prefill as prefix_prefill_module
from kvtier_kernels.attention.paged_attention import attend_with_triton
from kvtier_kernels.attention.paged_decode import paged_decode
from kvtier_kernels.attention.prefix_prefill import prefix_prefill
from kvtier_kernels.scoring import Scoring
from kvtier_kernels.tiles import Tile
from sweeps import IN_FULL

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPE_IDS = ["float32", "bfloat16", "float16"]
PREFILLS = CASES | {
    "exactly a block": Case((16,), (16,)),
    "a block and one": Case((17,), (17,)),
    "a block less one": Case((15,), (15,)),
    "exactly a tile of keys": Case((3, 64), (64, 128)),
    "a tile of keys and one": Case((3, 65), (65, 129)),
    "a tile of keys less one": Case((3, 63), (63, 127)),
    "blocks larger than a tile": Case((9, 30), (300, 520), tokens_per_block=256, num_heads=2, num_kv_heads=2),
    "head of 80": Case((21,), (50,), num_heads=4, num_kv_heads=2, head_dim=80),
    "head of 96": Case((21,), (50,), num_heads=4, num_kv_heads=2, head_dim=96),
    "head of 256": Case((21, 1), (50, 9), num_heads=4, num_kv_heads=2, head_dim=256),
    "group of seven": Case((40, 19), (90, 19), num_heads=14, num_kv_heads=2),
    "group wider than a tile's least rows": Case((5,), (40,), num_heads=40, num_kv_heads=1, head_dim=16),
    "many short sequences": Case(tuple(1 + i % 5 for i in range(20)), tuple(5 + i % 5 for i in range(20)), num_heads=3),
}  # fmt: skip
DECODES = {
    "one key": Case((1,), (1,)),
    "around a block": Case((1,) * 5, (15, 16, 17, 31, 33)),
    "around a tile": Case((1,) * 4, (63, 64, 65, 1), num_heads=8, num_kv_heads=1, head_dim=128),
    "block of one token": Case((1, 1), (7, 70), tokens_per_block=1, num_heads=4, num_kv_heads=4, head_dim=32),
    "large block": Case((1, 1), (300, 257), tokens_per_block=256, num_heads=14, num_kv_heads=2, head_dim=80),
    "head of 256": Case((1, 1), (90, 33), num_heads=2, num_kv_heads=1, head_dim=256),
    "group of forty": Case((1,), (50,), num_heads=40, num_kv_heads=1, head_dim=96),
}


def check(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, scale: float) -> None:
    expected_lse = torch.full_like(lse, math.nan)
    expected = paged_attention_reference(*inputs.args(scale), expected_lse)
    assert out.dtype == inputs.query.dtype
    assert out.is_contiguous()
    # Written so that NaN fails.
    assert (out.float() - expected).abs().max().item() <= kernel_error_bound(inputs, scale)
    both_empty = (lse == -math.inf) & (expected_lse == -math.inf)
    assert (lse - expected_lse).masked_fill(both_empty, 0.0).abs().max().item() <= lse_error_bound(inputs, scale)


def prefill(
    inputs: Inputs, scale: float, *, max_seq_len: int | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.full(inputs.query.shape[:2], math.nan)
    return prefix_prefill(*inputs.args(scale, max_seq_len=max_seq_len), lse, **options), lse


def decode(inputs: Inputs, scale: float, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.full(inputs.query.shape[:2], math.nan)
    return paged_decode(*inputs.args(scale), lse, **options), lse


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
@pytest.mark.parametrize("case", PREFILLS.values(), ids=PREFILLS.keys())
def test_prefill_agrees_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    inputs, scale = make_inputs(case, dtype), case.head_dim**-0.5
    check(inputs, *prefill(inputs, scale), scale)


@pytest.mark.parametrize(
    ("num_splits", "dtype"), [(1, torch.float32), (3, torch.float32), (16, torch.float32), (1, torch.bfloat16)]
)
@pytest.mark.parametrize("case", DECODES.values(), ids=DECODES.keys())
def test_decode_agrees_with_the_reference(case: Case, num_splits: int, dtype: torch.dtype) -> None:
    """With 16, most runs are empty."""
    inputs, scale = make_inputs(case, dtype), case.head_dim**-0.5
    check(inputs, *decode(inputs, scale, num_splits=num_splits), scale)


@pytest.mark.parametrize(
    "tile", [Tile(16, 16, 4, 1), Tile(32, 128, 4, 1), Tile(256, 16, 4, 1)], ids=["small", "wide", "tall"]
)
def test_any_tile_gives_the_same(tile: Tile) -> None:
    case = Case((33, 1, 20), (150, 40, 20), tokens_per_block=8, num_heads=6, num_kv_heads=2, head_dim=48)
    inputs, scale = make_inputs(case, torch.float32), 0.2
    check(inputs, *prefill(inputs, scale, tile=tile), scale)
    ones = make_inputs(dataclasses.replace(case, query_lens=(1, 1, 1)), torch.float32)
    check(ones, *decode(ones, scale, tile=tile, num_splits=2), scale)


QUANTISED = {
    "int8": (torch.int8, True, torch.bfloat16, (9, 0)),
    "int8, float32": (torch.int8, True, torch.float32, (9, 0)),
    "float8": (torch.float8_e4m3fn, True, torch.float16, (9, 0)),
    "float8, two scales": (torch.float8_e4m3fn, False, torch.bfloat16, (9, 0)),
    "float8 on a chip without": (torch.float8_e4m3fn, True, torch.bfloat16, (8, 0)),
}
TWO_LENGTHS = Case((40, 3), (90, 19), num_heads=6, num_kv_heads=2, head_dim=24)


@pytest.mark.parametrize(("kv_dtype", "per_key", "dtype", "capability"), QUANTISED.values(), ids=QUANTISED.keys())
def test_quantised_kv(
    kv_dtype: torch.dtype,
    per_key: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (prefix_prefill_module, paged_decode_module):
        monkeypatch.setattr(module, "capability", lambda _device: capability)
    for case, attend in ((TWO_LENGTHS, prefill), (dataclasses.replace(TWO_LENGTHS, query_lens=(1, 1)), decode)):
        inputs = quantised(make_inputs(case, torch.float32), kv_dtype, per_key=per_key)
        inputs = dataclasses.replace(inputs, query=inputs.query.to(dtype))
        check(inputs, *attend(inputs, 0.2), 0.2)


def test_float8_without_scales_stands_for_itself() -> None:
    inputs = quantised(make_inputs(TWO_LENGTHS, torch.float32), torch.float8_e4m3fn, per_key=False)
    inputs = dataclasses.replace(inputs, kv_scales=None, query=inputs.query / 100)
    check(inputs, *prefill(inputs, 0.2), 0.2)


@pytest.mark.parametrize(("window", "tokens_per_block"), [(1, 16), (17, 7), (50, 64), (200, 16)])
def test_windows(window: int, tokens_per_block: int) -> None:
    """Blocks that no query sees are not read."""
    case = Case((70, 1, 5), (150, 40, 5), tokens_per_block, num_heads=6, num_kv_heads=2, head_dim=48)
    inputs = windowed(make_inputs(case, torch.float32), window)
    check(inputs, *prefill(inputs, 0.2, tile=Tile(64, 32, 4, 1)), 0.2)
    ones = windowed(make_inputs(dataclasses.replace(case, query_lens=(1, 1, 1)), torch.float32), window)
    check(ones, *decode(ones, 0.2, num_splits=3), 0.2)


@pytest.mark.parametrize(("rules", "num_splits"), [*((rules, 1) for rules in SCORINGS), (SCORINGS[-1], 3)])
def test_scoring(rules: tuple[str, ...], num_splits: int) -> None:
    """Heads are no power of two: rows that stand for none of them have neither slope nor sink."""
    case = Case((40, 1, 5), (150, 40, 5), num_heads=6, num_kv_heads=2, head_dim=48)
    for queries, attend in (((40, 1, 5), prefill), ((1, 1, 1), decode)):
        inputs = make_inputs(dataclasses.replace(case, query_lens=queries), torch.float32)
        options = {"tile": Tile(32, 32, 4, 1)} if attend is prefill else {}
        others = [windowed(inputs, 30), quantised(inputs, torch.int8, per_key=True)]
        for batch in [inputs, *(others if rules == SCORINGS[-1] else [])]:
            changed = scored(batch, *rules)
            check(changed, *attend(changed, 0.3, num_splits=num_splits, **options), 0.3)


def test_scores_of_any_size_are_capped() -> None:
    """The exponential of such a score is infinite, and that of its negative is 0."""
    inputs = scored(make_inputs(TWO_LENGTHS, torch.float32), "soft_cap")
    inputs = dataclasses.replace(inputs, query=inputs.query * 1e4)
    out, lse = prefill(inputs, 0.2)
    assert out.isfinite().all()
    assert lse.abs().max().item() <= 1.5 + math.log(90) + 1e-5


def test_a_query_without_keys_sees_its_sink() -> None:
    inputs = scored(make_inputs(Case((6, 2), (6, 9)), torch.float32), "sinks")
    inputs.seq_lens[0] = 4
    for num_splits in (1, 3):
        out, lse = prefill(inputs, 0.125, num_splits=num_splits)
        assert torch.equal(out[:2], torch.zeros_like(out[:2]))
        assert inputs.scoring.sinks is not None
        assert (lse[:2] - inputs.scoring.sinks).abs().max().item() < 1e-6
        check(inputs, out, lse, 0.125)


def test_a_sink_of_minus_infinity_is_none() -> None:
    """The second and the last head have such a sink, and two queries see no key."""
    inputs = make_inputs(Case((6, 1), (6, 9), num_heads=3, num_kv_heads=1), torch.float32)
    inputs.seq_lens[0] = 4
    inputs.scoring = Scoring(sinks=torch.tensor([0.5, -math.inf, -math.inf]))
    assert kernel_error_bound(inputs, 0.125) < 1e-2
    assert lse_error_bound(inputs, 0.125) < 1e-2
    for num_splits in (1, 3):
        check(inputs, *prefill(inputs, 0.125, num_splits=num_splits), 0.125)
    ones = make_inputs(Case((1, 1), (33, 9), num_heads=3, num_kv_heads=1), torch.float32)
    ones.scoring = inputs.scoring
    check(ones, *decode(ones, 0.125), 0.125)


def in_poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What launchers allocate holds NaN, as memory that was used before may."""
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, math.nan, **options))


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("num_splits", [2, 5])
def test_prefill_in_runs_of_keys(num_splits: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 5, some runs of each tile are empty, and with a window all but one or two."""
    inputs = make_inputs(Case((20, 1, 3), (150, 40, 3), num_heads=6, num_kv_heads=2, head_dim=48), torch.float32)
    inputs = inputs if window is None else windowed(inputs, window)
    in_poisoned_memory(monkeypatch)
    check(inputs, *prefill(inputs, 0.2, tile=Tile(32, 32, 4, 1), num_splits=num_splits), 0.2)


def test_few_queries_over_many_keys_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(Case((2,), (5000,), tokens_per_block=256, num_heads=1, num_kv_heads=1, head_dim=16), DTYPES[1])
    asked: list[int] = []
    right = prefix_prefill_module.prefill_splits
    monkeypatch.setattr(prefix_prefill_module, "prefill_splits", lambda *args: asked.append(right(*args)) or asked[-1])
    in_poisoned_memory(monkeypatch)
    check(inputs, *prefill(inputs, 0.25), 0.25)
    assert asked == [4], "the interpreter stands for four multiprocessors"
    check(inputs, *prefill(inputs, 0.25, max_seq_len=100), 0.25)
    assert asked == [4, 1]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    queries = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    num_kv_heads = draw(st.integers(1, 3))
    return Case(
        query_lens=tuple(queries),
        seq_lens=tuple(n + draw(st.integers(0, 100)) for n in queries),
        tokens_per_block=2 ** draw(st.integers(0, 8)),
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.integers(1, 70)),
    )


@settings(max_examples=50 if IN_FULL else 10, deadline=None, derandomize=not IN_FULL)
@given(
    case=cases(),
    dtype=st.sampled_from(DTYPES),
    kv=st.sampled_from([None, *QUANTISED.values()]),
    window=st.none() | st.integers(1, 120),
    num_splits=st.sampled_from([None, 1, 3]),
    rules=st.sampled_from([(), *SCORINGS]),
)
def test_any_batch_agrees_with_the_reference(
    case: Case, dtype: torch.dtype, kv: Any, window: int | None, num_splits: int | None, rules: tuple[str, ...]
) -> None:
    scale, ones = case.head_dim**-0.5, dataclasses.replace(case, query_lens=(1,) * len(case.seq_lens))
    for batch, attend in ((case, prefill), (ones, decode)):
        inputs = make_inputs(batch, dtype if kv is None else torch.float32)
        if kv is not None:
            quantised_inputs = quantised(inputs, kv[0], per_key=kv[1])
            inputs = dataclasses.replace(quantised_inputs, query=inputs.query.to(dtype))
        inputs = scored(inputs if window is None else windowed(inputs, window), *rules)
        check(inputs, *attend(inputs, scale, num_splits=num_splits), scale)


def test_the_bound_notices_a_key_too_many() -> None:
    inputs = make_inputs(CASES["prefill over a cached prefix"], torch.float32)
    out, _ = prefill(inputs, 0.125)
    shorter = paged_attention_reference(*dataclasses.replace(inputs, seq_lens=inputs.seq_lens - 1).args(0.125))
    assert (out - shorter).abs().max().item() > 20 * kernel_error_bound(inputs, 0.125)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_physical_blocks_and_stale_bytes_do_not_change_a_bit(dtype: torch.dtype) -> None:
    for case, attend in ((CASES["decode and prefill together"], prefill), (DECODES["around a block"], decode)):
        first = attend(make_inputs(case, dtype, block_seed=0, poison=math.nan), 0.125)
        second = attend(make_inputs(case, dtype, block_seed=7, poison=6e4), 0.125)
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    """Lengths that do not fit cannot be refused without waiting for a GPU. They must not become NaN."""
    inputs = make_inputs(Case((6, 2), (6, 9)), torch.float32)
    inputs.seq_lens[0] = 4
    out, lse = prefill(inputs, 0.125)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert (lse[:2] == -math.inf).all()
    expected = paged_attention_reference(*inputs.args(0.125))
    assert torch.equal(expected[:2], out[:2])
    assert (out - expected).abs().max().item() <= kernel_error_bound(inputs, 0.125)

    inputs = make_inputs(Case((1, 1), (6, 9)), torch.float32)
    inputs.seq_lens[0] = 0
    for num_splits in (1, 4):
        out, lse = decode(inputs, 0.125, num_splits=num_splits)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert (lse[0] == -math.inf).all()
        assert out.isfinite().all()


def test_lengths_beyond_the_block_table_are_cut() -> None:
    inputs = make_inputs(Case((1,), (64,)), torch.float32)
    exact = dataclasses.replace(inputs, block_tables=inputs.block_tables[:, :4].contiguous())
    longer = dataclasses.replace(exact, seq_lens=exact.seq_lens + 1000)
    assert torch.equal(decode(longer, 0.125)[0], decode(exact, 0.125)[0])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_mixed_and_single_query_batches_take_their_kernels(index_dtype: torch.dtype) -> None:
    for case in (CASES["decode and prefill together"], DECODES["around a block"]):
        inputs = make_inputs(case, torch.float32)
        index = inputs.block_tables, inputs.query_starts, inputs.seq_lens
        inputs = Inputs(inputs.query, inputs.kv_layer, *(tensor.to(index_dtype) for tensor in index))
        out = attend_with_triton(*inputs.args(0.125))
        expected = paged_attention_reference(*inputs.args(0.125))
        assert (out - expected).abs().max().item() <= kernel_error_bound(inputs, 0.125)


def test_nothing_to_do_is_done() -> None:
    inputs = make_inputs(Case((2,), (9,)), torch.float32)
    tables, starts, lens = inputs.block_tables[:0], inputs.query_starts[:1], inputs.seq_lens[:0]
    none = Inputs(inputs.query[:0], inputs.kv_layer, tables, starts, lens)
    for launcher in (prefix_prefill, paged_decode):
        assert launcher(*none.args(1.0)).shape == none.query.shape
