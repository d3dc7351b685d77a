"""`python -m kvtier_kernels.selfcheck`, where the GPU is the interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtier_kernels import AttentionBatch, paged_attention_reference
from kvtier_kernels.attention import merge_states, paged_decode, prefix_prefill, shared_prefix_decode
from kvtier_kernels.copies import block_checksum, block_copy, part_copy, quantised_copy
from kvtier_kernels.invariant import linear, rms_norm
from kvtier_kernels.selfcheck import command as selfcheck
from kvtier_kernels.selfcheck import copies as selfcheck_copies
from kvtier_kernels.selfcheck import invariance as selfcheck_invariance
from kvtier_kernels.writes import slot_write

CPU = torch.device("cpu")
NUM_COPY_CHECKS = 5 * 3 + 3 + 2 * 2 * 2


@pytest.fixture(autouse=True)
def _less_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "HEADS", ((6, 2, 64),))
    monkeypatch.setattr(selfcheck_invariance, "LINEAR_SIZES", ((100, 70),))
    monkeypatch.setattr(selfcheck_invariance, "NORM_WIDTHS", (80,))
    monkeypatch.setattr(selfcheck_invariance, "NUM_ROWS", 24)
    monkeypatch.setattr(selfcheck_copies, "NUM_PAIRS", 3)
    monkeypatch.setattr(selfcheck_copies, "NUM_PARTS", 2)
    monkeypatch.setattr(selfcheck_copies, "CHECKSUM_BYTES", (56, 2**16 + 8, 2**17))


def test_right_kernels_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "DTYPES", (torch.bfloat16, torch.float32))
    checks = dict(selfcheck.run_checks(CPU, longest=70))
    assert len(checks) == 2 * 8 + 3 * 4 + 2 * 2 + NUM_COPY_CHECKS
    assert set(checks.values()) == {""}


def test_shares_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [(str(number), lambda: "") for number in range(10)]
    monkeypatch.setattr(selfcheck, "all_checks", lambda *_: iter(checks))
    names = [[name for name, _ in selfcheck.run_checks(CPU, share=share, num_shares=3)] for share in range(3)]
    assert names == [["0", "3", "6", "9"], ["1", "4", "7"], ["2", "5", "8"]]


def test_a_kernel_that_raises_stops_no_other_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising() -> str:
        raise RuntimeError("out of resource:\n shared memory")

    monkeypatch.setattr(selfcheck, "all_checks", lambda *_: iter([("first", raising), ("second", lambda: "")]))
    found = list(selfcheck.run_checks(CPU))
    assert found == [("first", "RuntimeError: out of resource: shared memory"), ("second", "")]


def _wrong(
    query: Tensor, kv_layer: Tensor, batch: AttentionBatch, kv_scales: Tensor | None, lse: Tensor, **_options: Any
) -> Tensor:
    return paged_attention_reference(query, kv_layer, replace(batch, scale=1.1 * batch.scale), kv_scales, lse)


def test_wrong_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_prefill, "prefix_prefill", _wrong)
    monkeypatch.setattr(paged_decode, "paged_decode", _wrong)
    monkeypatch.setattr(shared_prefix_decode, "shared_prefix_decode", _wrong)
    monkeypatch.setattr(merge_states, "merge_states", lambda *_args: None)
    monkeypatch.setattr(slot_write, "write_slots", lambda *_args: None)
    monkeypatch.setattr(linear, "invariant_linear", lambda rows, weight: 1.1 * rows @ weight.t())
    monkeypatch.setattr(rms_norm, "invariant_rms_norm", lambda rows, *_args: 1.1 * rows)
    monkeypatch.setattr(block_copy, "block_copy", lambda *_args: None)
    monkeypatch.setattr(block_checksum, "block_checksum", lambda _parts, block_ids, *_args: torch.zeros_like(block_ids))
    monkeypatch.setattr(part_copy, "part_copy", lambda *_args, **_options: None)
    monkeypatch.setattr(quantised_copy, "quantised_copy", lambda *_args, **_options: None)
    monkeypatch.setattr(selfcheck, "DTYPES", (torch.float32,))
    for name, failure in selfcheck.run_checks(CPU, longest=70):
        assert failure, name
        assert "Error: " not in failure, name


def test_nan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_prefill, "prefix_prefill", lambda query, *_args, **_options: query * float("nan"))
    name, failure = next(selfcheck.run_checks(CPU, longest=70))
    assert name.startswith("prefix_prefill")
    assert failure.startswith("output is off by nan")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines: list[str] = []
    assert selfcheck.main(write=lines.append) == 2
    assert lines == ["no CUDA device: nothing was checked"]
