"""`prefix_prefill` beside torch's attention, with the rate of a plain matrix product as what the chip can do."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kvtier_bench.gpu.measuring.attending import prefilling
from kvtier_bench.gpu.measuring.comparing import WrongResultError, require_close
from kvtier_bench.gpu.measuring.each import each
from kvtier_bench.gpu.measuring.rows import Bar, failure, held_to, median_s, prefill_flops, row
from kvtier_bench.gpu.measuring.setting import Run, Setting
from kvtier_bench.gpu.measuring.shapes import Batch, Heads, dense, heads_of, paged, unpaged
from kvtier_bench.gpu.measuring.timing import DeviceClock, in_turns
from kvtier_bench.measuring.report import Case
from kvtier_bench.measuring.rounds import Samples

_NEW = (512, 2048, 8192)
_CACHED = (0, 4096, 16384, 65536)
_OURS = ("paged", "one block")
_LEAST = {"torch flash": 1.0, "one block": 0.9}
"""What ours over paged keys is held to."""
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_BLOCK_TOKENS = 2**17
"""More than any sequence has."""
_MATRIX = 8192


def lengths(setting: Setting) -> list[tuple[int, int]]:
    """New and cached tokens, those first that take little time."""
    if setting.tiny:
        return [(9, 0), (5, 20)]
    return sorted(((new, cached) for new in _NEW for cached in _CACHED), key=lambda pair: pair[0] * sum(pair))


def measure(setting: Setting) -> Iterator[Case]:
    """One sequence; operations counted are those that a causal mask leaves."""
    clock, product = DeviceClock(setting), matrix_product(setting)
    cases: dict[str, Callable[[], Iterator[Case]]] = {}
    for new, cached in lengths(setting):
        op = f"prefill of {new:,} after {cached:,}"
        cases[op] = partial(_prefill, setting, op, new, cached, clock, product)
    yield from each(setting, cases)


def _prefill(setting: Setting, op: str, new: int, cached: int, clock: DeviceClock, product: Run) -> Iterator[Case]:
    heads = heads_of(setting)
    subjects = _subjects(setting, paged(setting, heads, num_seqs=1, new=new, cached=cached), heads)
    differences, wrong = _differences(subjects)
    yield from (failure(name, op, reason) for name, reason in wrong.items())
    if wrong:  # no figures of what is wrong, nor of what is right beside it
        return
    samples = in_turns({**subjects, "matrix product": product}, setting, clock.seconds)
    matrix_rate = 2 * setting.size(_MATRIX, 32) ** 3 / median_s(samples.pop("matrix product"))
    others = {name: of for name, of in samples.items() if name.startswith("torch")}
    best = min(others, key=lambda name: median_s(others[name]))
    flops = prefill_flops(heads.num_heads, heads.head_dim, new, cached)
    for name, of in samples.items():
        case = row(
            name,
            op,
            of,
            floor=(best, others[best]),
            beside=_besides(samples, best),
            figures={
                "TFLOP/s": flops / median_s(of) / 1e12,
                "of the matrix rate": flops / median_s(of) / matrix_rate,
                "difference from torch": differences[name],
            },
        )
        yield _held_to(case, tiny=setting.tiny) if name == "paged" else case


def _held_to(case: Case, *, tiny: bool) -> Case:
    """Ours over paged keys, beside torch's flash and ours over keys in one block."""
    for name, least in _LEAST.items():
        if name in case.beside:
            case = held_to(case, Bar(f"x {name}", case.beside[name].median_s, least), tiny=tiny)
    return case


def _besides(samples: dict[str, Samples], best: str) -> dict[str, Samples]:
    """Ours over keys in one block, the fastest of torch's, and flash wherever it runs."""
    beside = {"one block": samples["one block"], "torch best": samples[best]}
    return beside | ({"torch flash": samples["torch flash"]} if "torch flash" in samples else {})


def matrix_product(setting: Setting) -> Run:
    """A square product of random numbers: zeros would flatter the chip."""
    size = setting.size(_MATRIX, 32)
    left, right = (torch.randn((size, size), dtype=setting.dtype, device=setting.device) for _ in range(2))
    into = torch.empty_like(left)
    return lambda: torch.matmul(left, right, out=into)


def _subjects(setting: Setting, batch: Batch, heads: Heads) -> dict[str, Callable[[], Tensor]]:
    """Ours, over paged keys and over keys in one block, and those of torch's backends that take it.

    All give `[tokens, heads, head_dim]`.
    """
    in_one = unpaged(batch, setting.size(_BLOCK_TOKENS, 32))
    ours = dict(zip(_OURS, (prefilling(setting, of, heads) for of in (batch, in_one)), strict=True))
    return {**ours, **torch_attentions(*dense(batch), scale=heads.scale)}


def _differences(subjects: Mapping[str, Callable[[], Tensor]]) -> tuple[dict[str, float], dict[str, str]]:
    """How far each is from the first of torch's, and of those that are too far, what is wrong."""
    expected = next(attend for name, attend in subjects.items() if name not in _OURS)()
    differences, wrong = {}, {}
    for name, attend in subjects.items():
        try:
            differences[name] = require_close(name, attend(), expected)
        except WrongResultError as error:
            wrong[name] = str(error)
    return differences, wrong


def torch_attentions(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> dict[str, Callable[[], Tensor]]:
    """Torch's backends that take it, causal with the last query at the last key; the plain one where none does.

    A backend that does not take groups of heads gets keys and values repeated for them, outside of what is timed.
    """
    group = query.size(1) // key.size(1)
    repeated = [tensor.repeat_interleave(group, dim=1) for tensor in (key, value)]
    lower_right = causal_lower_right(query.size(2), key.size(2))
    square = query.size(2) == key.size(2)

    def with_backend(backend: SDPBackend, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
        mask: dict[str, Any] = {"is_causal": True} if square else {"attn_mask": lower_right}
        options = {**mask, "scale": scale, "enable_gqa": keys is key}

        def attend() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, keys, values, **options)[0].transpose(0, 1)

        return attend

    found: dict[str, Callable[[], Tensor]] = {}
    for name, backend in _BACKENDS.items():
        if name == "cudnn" and not square:  # it would be handed the mask written out
            continue
        for keys, values in ((key, value), repeated):
            attend = with_backend(backend, keys, values)
            try:
                attend()
            except (RuntimeError, NotImplementedError):  # not here, or not of this shape
                continue
            found[f"torch {name}"] = attend
            break
    return found or {"torch math": with_backend(SDPBackend.MATH, key, value)}
