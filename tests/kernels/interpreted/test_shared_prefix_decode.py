"""`shared_prefix_decode` in the interpreter, against the reference: odd groups and sizes, poisoned memory."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_rig import Case, Inputs, kernel_error_bound, lse_error_bound, make_inputs, quantised, scored
from kvtier_kernels import paged_attention_reference
from kvtier_kernels.attention.shared_prefix_decode import shared_prefix_decode
from kvtier_kernels.attention.shared_prefixes import SharedPrefixes
from kvtier_kernels.tiles import Tile


@dataclasses.dataclass(frozen=True)
class Sharing:
    """A batch of one query each, and which of its sequences share how many blocks."""

    case: Case
    groups: tuple[tuple[tuple[int, ...], int], ...]


def decodes(*seq_lens: int, **geometry: int) -> Case:
    return Case((1,) * len(seq_lens), seq_lens, **geometry)


CASES = {
    "all of them": Sharing(decodes(70, 41, 133), (((0, 1, 2), 2),)),
    "two groups and one alone": Sharing(
        decodes(30, 90, 100, 29, 77, 8, tokens_per_block=7, num_heads=14, num_kv_heads=2, head_dim=80),
        (((0, 2, 4), 3), ((1, 3), 4)),
    ),
    "more than a tile": Sharing(
        decodes(*(150 + seq for seq in range(19)), num_heads=4, num_kv_heads=1, head_dim=128), ((tuple(range(19)), 9),)
    ),
    "nothing of their own": Sharing(decodes(64, 64, 65, num_heads=8, num_kv_heads=1), (((0, 1, 2), 4),)),
    "nothing shared": Sharing(decodes(40, 3), ()),
    "block of one token": Sharing(
        decodes(7, 70, 68, tokens_per_block=1, num_heads=4, num_kv_heads=4, head_dim=32), (((1, 2), 67),)
    ),
    "large block": Sharing(decodes(300, 257, tokens_per_block=256, num_heads=2, num_kv_heads=2), (((0, 1), 1),)),
    "group of heads wider than a tile's least rows": Sharing(
        decodes(50, 33, num_heads=71, num_kv_heads=1, head_dim=24), (((0, 1), 2),)
    ),
}  # fmt: skip


def make_shared(sharing: Sharing, dtype: torch.dtype, **options: Any) -> Inputs:
    """Nobody's blocks that are not shared are looked for in the blocks of others: those hold NaN."""
    inputs = make_inputs(sharing.case, dtype, **options)
    for (first, *others), num_blocks in sharing.groups:
        for seq in others:
            inputs.kv_layer[inputs.block_tables[seq, :num_blocks].long()] = math.nan
            inputs.block_tables[seq, :num_blocks] = inputs.block_tables[first, :num_blocks]
    return inputs


def prefixes_of(inputs: Inputs) -> SharedPrefixes:
    return SharedPrefixes.of(inputs.block_tables, inputs.seq_lens, inputs.kv_layer.size(2))


def attend(
    inputs: Inputs, scale: float, *, prefixes: SharedPrefixes | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    lse = torch.full(inputs.query.shape[:2], math.nan)
    return shared_prefix_decode(*inputs.args(scale, prefixes=prefixes or prefixes_of(inputs)), lse, **options), lse


def check(inputs: Inputs, out: Tensor, lse: Tensor, scale: float) -> None:
    expected_lse = torch.full_like(lse, math.nan)
    expected = paged_attention_reference(*inputs.args(scale), expected_lse)
    assert out.dtype == inputs.query.dtype
    assert (out.float() - expected).abs().max().item() <= kernel_error_bound(inputs, scale)
    assert (lse - expected_lse).abs().max().item() <= lse_error_bound(inputs, scale)


@pytest.mark.parametrize(
    ("num_splits", "dtype"),
    [((3, 2), torch.float32), (None, torch.bfloat16)],
    ids=["float32 in runs", "bfloat16"],
)
@pytest.mark.parametrize("sharing", CASES.values(), ids=CASES.keys())
def test_it_agrees_with_the_reference(sharing: Sharing, num_splits: tuple[int, int] | None, dtype: torch.dtype) -> None:
    inputs, scale = make_shared(sharing, dtype), sharing.case.head_dim**-0.5
    saved = sum((len(members) - 1) * num_blocks for members, num_blocks in sharing.groups)
    assert prefixes_of(inputs).num_saved_keys == saved * sharing.case.tokens_per_block
    check(inputs, *attend(inputs, scale, num_splits=num_splits), scale)


def test_shared_keys_are_read_once() -> None:
    """The shared part of all tables but one is never looked at: it could name a block of NaN."""
    inputs = make_shared(CASES["two groups and one alone"], torch.float32)
    prefixes = prefixes_of(inputs)
    starts, members = prefixes.group_starts.tolist(), prefixes.members.tolist()
    expected = attend(inputs, 0.125, prefixes=prefixes)
    unused = (set(range(inputs.kv_layer.size(0))) - set(inputs.block_tables.flatten().tolist())).pop()
    assert inputs.kv_layer[unused].isnan().all()
    for group, keys in enumerate(prefixes.group_keys.tolist()):
        for seq in members[starts[group] + 1 : starts[group + 1]]:
            inputs.block_tables[seq, : keys // 7] = unused
    for ours, theirs in zip(attend(inputs, 0.125, prefixes=prefixes), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_sequences_may_have_grown_since() -> None:
    """Prefixes of an earlier step stay right."""
    inputs = make_shared(CASES["all of them"], torch.float32)
    earlier = SharedPrefixes.of(inputs.block_tables, inputs.seq_lens - 9, 16)
    assert earlier.num_saved_keys > 0
    check(inputs, *attend(inputs, 0.125, prefixes=earlier), 0.125)


def test_physical_blocks_and_stale_bytes_do_not_change_a_bit() -> None:
    first, second = (
        attend(make_shared(CASES["two groups and one alone"], torch.float16, block_seed=seed, poison=poison), 0.125)
        for seed, poison in ((0, math.nan), (7, 6e4))
    )
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize(("dtype", "per_key"), [(torch.int8, True), (torch.float8_e4m3fn, False)], ids=["int8", "fp8"])
def test_quantised_keys_agree_with_the_reference(dtype: torch.dtype, per_key: bool) -> None:
    inputs = quantised(make_shared(CASES["two groups and one alone"], torch.bfloat16), dtype, per_key=per_key)
    check(inputs, *attend(inputs, 0.125, num_splits=(2, 1)), 0.125)


@pytest.mark.parametrize("rules", [("soft_cap",), ("sinks",), ("soft_cap", "sinks")], ids="-".join)
def test_scoring(rules: tuple[str, ...]) -> None:
    inputs = scored(make_shared(CASES["two groups and one alone"], torch.float32), *rules)
    check(inputs, *attend(inputs, 0.3, num_splits=(2, 3)), 0.3)


def test_any_tile_gives_the_same() -> None:
    inputs = make_shared(CASES["two groups and one alone"], torch.float32)
    for tile in (Tile(16, 128, 4, 1), Tile(128, 32, 4, 1)):
        check(inputs, *attend(inputs, 0.2, tile=tile, num_splits=(1, 1)), 0.2)


def test_the_bound_notices_a_key_too_few() -> None:
    inputs = make_shared(CASES["all of them"], torch.float32)
    prefixes = prefixes_of(inputs)
    prefixes.own_starts[1] += 1
    out, _ = attend(inputs, 0.125, prefixes=prefixes)
    expected = paged_attention_reference(*inputs.args(0.125))
    difference = (out - expected).abs().amax(dim=(1, 2))
    assert difference[1].item() > 20 * kernel_error_bound(inputs, 0.125) > 20 * difference[[0, 2]].max().item()


def test_nothing_to_do_is_done() -> None:
    inputs = make_inputs(decodes(9), torch.float32)
    tables, starts, lens = inputs.block_tables[:0], inputs.query_starts[:1], inputs.seq_lens[:0]
    none = Inputs(inputs.query[:0], inputs.kv_layer, tables, starts, lens)
    assert attend(none, 1.0)[0].shape == (0, 9, 64)


def test_what_does_not_fit_is_refused() -> None:
    inputs = make_shared(CASES["all of them"], torch.float32)
    tables, lens, prefixes = inputs.block_tables, inputs.seq_lens, prefixes_of(inputs)
    missing = tables.clone()
    missing[1, 1] = inputs.kv_layer.size(0)
    fewer = SharedPrefixes.of(tables[:2], lens[:2], 16)
    away = dataclasses.replace(prefixes, index=prefixes.index.to("meta"))
    wide = {"query": torch.zeros(3, 1, 264), "kv_layer": torch.zeros(3, 2, 4, 1, 264)}
    sloping = {"scoring": scored(inputs, "alibi_slopes").scoring}
    refused: list[tuple[str, dict[str, Any], SharedPrefixes | None, dict[str, Any]]] = [
        ("prefixes is None: .*; use paged_decode", {}, None, {}),
        ("window given: .*; use paged_decode", {"window": 9}, prefixes, {}),
        ("alibi_slopes given: .*; use paged_decode", sloping, prefixes, {}),
        ("3 queries, 3 sequences, prefixes of 2: ", {}, fewer, {}),
        ("2 queries, 3 sequences, prefixes of 3: ", {"query": inputs.query[:2]}, prefixes, {}),
        ("prefixes are on meta, query on cpu", {}, away, {}),
        (r"block_tables\[1, 1\] is \d+: there are", {"block_tables": missing}, prefixes, {}),
        ("kv_layer is on meta", {"kv_layer": inputs.kv_layer.to("meta")}, prefixes, {}),
        ("block_tables .* needs shape", {"block_tables": tables[0]}, prefixes, {}),
        ("query .* needs kv_layer's", {"query": inputs.query.half()}, prefixes, {}),
        ("lse .* needs contiguous float32", {}, prefixes, {"lse": torch.empty(3)}),
        ("num_splits is", {}, prefixes, {"num_splits": (0, 1)}),
        ("num_splits is", {}, prefixes, {"num_splits": (1, 1025)}),
        ("tile.rows is 2: ", {}, prefixes, {"tile": Tile(2, 16, 4, 1)}),
        ("head_dim is 264: at most 256", wide, prefixes, {}),
    ]
    for words, changed, shared, options in refused:
        arguments = dataclasses.replace(inputs, **changed).args(0.125, prefixes=shared)
        with pytest.raises(ValueError, match=words):
            shared_prefix_decode(*arguments, **options)
