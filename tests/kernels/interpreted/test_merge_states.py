"""`merge_states` in the interpreter, against float64: odd sizes, states without keys, NaN."""

import math

import pytest
import torch
from torch import Tensor

from kvtier_kernels import merge_states_reference
from kvtier_kernels.attention.merge_states import merge_states
from kvtier_kernels.selfcheck.accuracy import merge_bound, merge_lse_bound

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DTYPE_IDS = ["float32", "bfloat16", "float16"]


def make_states(shape: tuple[int, int, int, int], dtype: torch.dtype, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A third of the states have no key, and NaN for a part; the others differ by hundreds in their log-sum-exps."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(shape, generator=generator)
    part_lse = torch.randn(shape[:3], generator=generator) * torch.tensor([3.0, 100.0])[torch.arange(shape[2]) % 2]
    empty = torch.rand(shape[:3], generator=generator) < 1 / 3
    empty[0, 0] = True
    parts[empty], part_lse[empty] = math.nan, -math.inf
    return parts.to(dtype), part_lse


def check(out: Tensor, lse: Tensor, parts: Tensor, part_lse: Tensor) -> None:
    expected, expected_lse = merge_states_reference(parts, part_lse)
    assert (out.double() - expected).abs().max().item() <= merge_bound(parts, part_lse, out.dtype)
    counted = expected_lse != -math.inf
    assert torch.equal(lse != -math.inf, counted)
    assert (lse.double() - expected_lse)[counted].abs().max().item() <= merge_lse_bound(part_lse)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(
    "shape",
    [(3, 5, 1, 64), (2, 3, 2, 80), (2, 3, 33, 128), (1, 7, 150, 24), (2, 1, 65, 1)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_states_are_merged(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """33 and 150, of these sizes, are more than a program takes at a time."""
    parts, part_lse = make_states(shape, dtype)
    for out_dtype in {dtype, torch.float32}:
        out = torch.full((*shape[:2], shape[3]), math.nan, dtype=out_dtype)
        lse = torch.full(shape[:2], math.nan)
        merge_states(parts, part_lse, out, lse)
        check(out, lse, parts, part_lse)
        assert torch.equal(out[0, 0], torch.zeros_like(out[0, 0]))
        again = torch.full_like(out, math.nan)
        merge_states(parts, part_lse, again)
        assert torch.equal(out, again)


@pytest.mark.parametrize("last", [2.0, -2.0])
def test_the_peak_may_be_among_the_last(last: float) -> None:
    """A program takes fewer states than there are at a time, so it scales down its earlier sum."""
    parts = torch.randn((1, 1, 33, 128), generator=torch.Generator().manual_seed(4))
    part_lse = torch.zeros(1, 1, 33)
    part_lse[0, 0, -1] = last
    out, lse = torch.full((1, 1, 128), math.nan), torch.full((1, 1), math.nan)
    merge_states(parts, part_lse, out, lse)
    check(out, lse, parts, part_lse)


def test_a_sink_is_a_state_of_nothing() -> None:
    parts, part_lse = make_states((2, 3, 33, 128), torch.float32)
    sinks = torch.tensor([-200.0, 0.0, 150.0])
    out, lse = torch.full((2, 3, 128), math.nan), torch.full((2, 3), math.nan)
    merge_states(parts, part_lse, out, lse, sinks=sinks)
    with_sinks = torch.cat([part_lse, sinks[:, None].expand(2, 3, 1)], 2)
    check(out, lse, torch.nn.functional.pad(parts, (0, 0, 0, 1)), with_sinks)
    for wrong in (sinks[:2], sinks.double(), sinks.to("meta")):
        with pytest.raises(ValueError, match="sinks"):
            merge_states(parts, part_lse, out, lse, sinks=wrong)


def test_attention_over_runs_of_keys_is_attention_over_all() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(4, 3, 90, generator=generator).double() * 5
    values = torch.randn(90, 16, generator=generator).double()
    runs = [slice(0, 7), slice(7, 8), slice(8, 90)]
    part_lse = torch.stack([scores[..., run].logsumexp(-1) for run in runs], dim=2).float()
    parts = torch.stack([scores[..., run].softmax(-1) @ values[run] for run in runs], dim=2).float()
    out, lse = torch.empty(4, 3, 16), torch.empty(4, 3)
    merge_states(parts, part_lse, out, lse)
    assert (out - scores.softmax(-1) @ values).abs().max().item() < 1e-5
    assert (lse - scores.logsumexp(-1)).abs().max().item() < 1e-5


def test_one_state_may_be_merged_where_it_is() -> None:
    parts, part_lse = make_states((4, 3, 1, 48), torch.float32)
    before, lse = parts.clone(), torch.empty(4, 3)
    merge_states(parts, part_lse, parts.view(4, 3, 48), lse)
    check(parts.view(4, 3, 48), lse, before, part_lse)


def test_a_state_that_counts_is_not_hidden_when_it_is_nan() -> None:
    parts, part_lse = torch.ones(1, 1, 3, 16), torch.zeros(1, 1, 3)
    parts[0, 0, 1] = math.nan
    out = torch.zeros(1, 1, 16)
    merge_states(parts, part_lse, out)
    assert out.isnan().all()
    parts, part_lse[0, 0, 1] = torch.ones(1, 1, 3, 16), math.nan
    merge_states(parts, part_lse, out)
    assert out.isnan().all()


def test_nothing_to_do_is_done() -> None:
    merge_states(torch.empty(0, 3, 2, 16), torch.empty(0, 3, 2), torch.empty(0, 3, 16), torch.empty(0, 3))


def test_what_does_not_fit_is_refused() -> None:
    good = {
        "parts": torch.zeros(4, 3, 2, 16),
        "part_lse": torch.zeros(4, 3, 2),
        "out": torch.zeros(4, 3, 16),
        "lse": torch.zeros(4, 3),
    }
    refused: list[tuple[str, dict[str, Tensor]]] = [
        (r"needs \[rows, heads, states, D\]", {"parts": good["parts"][0]}),
        (r"needs \[rows, heads, states, D\]", {"parts": good["parts"][:, :, :0]}),
        ("parts .* needs contiguous float32 or bfloat16 or float16", {"parts": good["parts"].double()}),
        ("parts .* needs contiguous", {"parts": good["parts"].transpose(0, 1).contiguous().transpose(0, 1)}),
        ("parts is on meta: Triton kernels", {"parts": good["parts"].to("meta")}),
        (r"part_lse .* needs contiguous float32 \[4, 3, 2\]", {"part_lse": good["part_lse"][:, :, :1]}),
        ("part_lse .* needs contiguous float32", {"part_lse": good["part_lse"].half()}),
        (r"out .* needs contiguous .* \[4, 3, 16\]", {"out": good["out"][:, :2]}),
        ("out .* needs contiguous", {"out": good["out"].int()}),
        ("out is on meta", {"out": good["out"].to("meta")}),
        ("lse .* needs contiguous float32", {"lse": good["lse"].double()}),
    ]
    for words, changed in refused:
        with pytest.raises(ValueError, match=words):
            merge_states(**(good | changed))
