"""`python -m kvtier_kernels.selfcheck`, where the GPU is the interpreter."""

import pytest
import torch

from kvtier_kernels import (
    block_copy,
    merge_states,
    part_copy,
    prefix_prefill,
    selfcheck,
    shared_prefix_decode,
    slot_write,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _less_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "HEADS", selfcheck.HEADS[1:2])


def test_right_kernels_pass() -> None:
    checks = dict(selfcheck.run_checks(CPU, longest=70))
    assert len(checks) == 3 * 7 + 2 * 5
    assert set(checks.values()) == {""}


def test_wrong_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = prefix_prefill.prefix_prefill
    monkeypatch.setattr(
        prefix_prefill, "prefix_prefill", lambda *args, scale, lse: right(*args, scale=1.1 * scale, lse=lse)
    )
    shared = shared_prefix_decode.shared_prefix_decode
    monkeypatch.setattr(
        shared_prefix_decode,
        "shared_prefix_decode",
        lambda *args, scale, lse: shared(*args, scale=1.1 * scale, lse=lse),
    )
    monkeypatch.setattr(merge_states, "merge_two_states", lambda *_args: None)
    monkeypatch.setattr(slot_write, "write_slots", lambda *_args: None)
    monkeypatch.setattr(block_copy, "block_copy", lambda *_args: None)
    monkeypatch.setattr(part_copy, "part_copy", lambda *_args, gather: None)
    monkeypatch.setattr(selfcheck, "DTYPES", (torch.float32,))
    for name, failure in selfcheck.run_checks(CPU, longest=70):
        assert bool(failure) == (not name.startswith("paged_decode")), name


def test_nan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = prefix_prefill.prefix_prefill
    monkeypatch.setattr(prefix_prefill, "prefix_prefill", lambda *args, **kwargs: right(*args, **kwargs) * float("nan"))
    name, failure = next(selfcheck.run_checks(CPU, longest=70))
    assert name.startswith("prefix_prefill")
    assert failure.startswith("output is off by nan")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines: list[str] = []
    assert selfcheck.main(lines.append) == 2
    assert lines == ["no CUDA device: nothing was checked"]
