"""`paged_decode` over sequences of very different lengths, in the interpreter: runs of about the same length."""

import math
from collections.abc import Iterator

import pytest
import torch

from attention_rig import Case, kernel_error_bound, lse_error_bound, make_inputs
from kvtier_kernels import paged_attention_reference
from kvtier_kernels.attention.paged_decode import paged_decode
from kvtier_kernels.launching import num_multiprocessors
from kvtier_kernels.tiles import decode_runs

CASE = Case((1,) * 5, (900, 3, 290, 40, 256), num_heads=4, num_kv_heads=2, head_dim=32)


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_fresh_memory_is_nan() -> None:
    assert torch.empty(5).isnan().all()


@pytest.mark.parametrize(
    ("max_seq_len", "num_keys"),
    [(900, sum(CASE.seq_lens)), (900, 7), (100, 100), (900, 10**6), (None, None)],
    ids=["right", "too few keys", "too short", "too many keys", "none"],
)
def test_hints_decide_on_time_alone(max_seq_len: int | None, num_keys: int | None) -> None:
    """What no run has written is not looked at."""
    inputs = make_inputs(CASE, torch.bfloat16)
    lse, expected_lse = (torch.full(inputs.query.shape[:2], math.nan) for _ in range(2))
    out = paged_decode(*inputs.args(0.2, max_seq_len=max_seq_len, num_keys=num_keys), lse)
    expected = paged_attention_reference(*inputs.args(0.2), expected_lse)
    assert (out.float() - expected).abs().max().item() <= kernel_error_bound(inputs, 0.2)
    assert (lse - expected_lse).abs().max().item() <= lse_error_bound(inputs, 0.2)


def test_only_long_sequences_are_cut() -> None:
    mean_keys = sum(CASE.seq_lens) // 5
    splits, run_keys = decode_runs(10, mean_keys, 900, num_multiprocessors(torch.device("cpu")))
    assert [min(splits, math.ceil(keys / run_keys)) for keys in CASE.seq_lens] == [4, 1, 2, 1, 1]
