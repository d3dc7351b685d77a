"""Products and norms of tokens: as torch does them, or with bits that do not depend on how many tokens there are.

Libraries choose the order of the sums in a product of matrices by its whole shape, so the last bits of a token's row
depend on how many tokens are beside it (He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab,
2025; vLLM has `VLLM_BATCH_INVARIANT` and SGLang `--enable-deterministic-inference` against it). `InvariantProducts`
computes tokens in tiles of few fixed sizes, all of which were seen to give the same bits; `TritonProducts`, by kernels
that have one size.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvtier.errors import ConfigError
from kvtier_engine.model.gates import invariantly_opened, opened
from kvtier_engine.model.weights import LlamaWeights


class Products(Protocol):
    """What a model multiplies by. One thread."""

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`: fresh `[num_tokens, out]`, contiguous, of `[num_tokens, in]` and `[out, in]`."""
        ...

    def gated(self, rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """The product with `down` of the opened gate times up; fresh `[num_tokens, hidden]`, contiguous."""
        ...

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMS norm of each row, as `rms_norm` rounds it: fresh, of `rows`' shape."""
        ...


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Hugging Face's order of roundings, in three passes: twice as fast as `F.rms_norm` on CPU.

    :param weight: `[width]`, or `[heads, width]`; float32 beside rows of 16 bits has Gemma's order.
    """
    wide = rows.float()
    norms: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norms.square_().div_(rows.size(-1)).add_(eps).rsqrt_()
    if weight.dtype == torch.float32:
        return (wide * scale).mul_(weight).to(rows.dtype)
    return (wide * scale).to(rows.dtype).mul_(weight)


class PlainProducts:
    """Torch's own: the last bits depend on the number of tokens."""

    def __init__(self, *, gelu: bool = False) -> None:
        """:param gelu: the gate is GELU, by its approximation with tanh, in place of SiLU."""
        self._gelu = gelu

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(rows, weight, bias)

    def gated(self, rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
        return F.linear(opened(gate, gelu=self._gelu).mul_(up), down)

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(rows, weight, eps)


@dataclass(frozen=True, slots=True, order=True)
class Tile:
    """The number of tokens that are computed at once; fewer are padded with zeros."""

    num_tokens: int
    by_columns: bool = False
    """The weight stands on the left and each token is a column, so that what the library cuts into blocks is the
    weight, whose size is always the same. Otherwise each token is a row, and the weight stands on the right."""

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """`[num_tokens, out]` of as many rows; a transposed view where tokens are columns."""
        return torch.mm(weight, rows.t()).t() if self.by_columns else F.linear(rows, weight)

    def gated(self, rows: Tensor, gate_up: Tensor, down: Tensor, *, gelu: bool = False) -> Tensor:
        """`PlainProducts.gated` of as many rows; a transposed view where tokens are columns."""
        if not self.by_columns:
            gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
            return self.linear(invariantly_opened(gate, gelu=gelu).mul_(up), down)
        gate, up = torch.mm(gate_up, rows.t()).chunk(2)
        return self.linear(invariantly_opened(gate, gelu=gelu).mul_(up).t(), down)


BASE = Tile(32)
"""What all others are compared with, and what is left where none is alike. With AMX in bfloat16, 1 to 32 rows take
about the same time: that of reading the weight."""
_CANDIDATES = (
    *(Tile(1 << exponent) for exponent in range(5)),
    BASE,
    *(Tile(64 * n, by_columns) for n in range(1, 5) for by_columns in (False, True)),
    Tile(512),
    Tile(1024),
)
"""Enough of them that little is padded. 256 columns of a product, and their transposition, stay in a core's cache.
Rows need no transposition; with AMX in bfloat16, 33 to 300 of them have other bits than `BASE`, and 1024 have its."""
_FEW_TOKENS = 256
"""Up to so many, one tile takes them all."""
_MOST_PADDING = 1 / 4
"""The part of a tile of more tokens than that which may be padding: to transpose takes longer."""
_MAX_DRAWN = 256
"""Rows of a probe that are drawn; more repeat them."""


class InvariantProducts:
    """A token's bits do not depend on the other tokens, nor on how many there are.

    At the start, each shape of weight is tried with each size of tile, and only sizes whose bits are those of `BASE`
    are used. So much is by observation; where nothing is alike, all products have the shape of `BASE`.
    """

    def __init__(self, weights: LlamaWeights, *, gelu: bool = False) -> None:
        """Tries all shapes of these weights: half a second for a model of 135 million parameters.

        :param gelu: as of `PlainProducts`.
        :raises ConfigError: this machine's products cannot be made invariant in this way.
        """
        self._gelu = gelu
        layers, head = weights.layers, weights.lm_head
        linear = {_shape(weight): weight for layer in layers for weight in (layer.qkv, layer.attention_output)}
        gated = {_shape(layer.gate_up): (layer.gate_up, layer.down) for layer in layers}
        with torch.inference_mode():
            # Only the last tokens of sequences come to the head: they are few.
            self._linear = {_shape(head): _one_of_each_size(_alike(head, most_tokens=_FEW_TOKENS))}
            self._linear |= {shape: _one_of_each_size(_alike(weight)) for shape, weight in linear.items()}
            self._gated = {
                shape: _one_of_each_size({*_alike(gate_up)}.intersection(_alike(down, after_gate=True)))
                for shape, (gate_up, down) in gated.items()
            }

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        tiles = self._linear[_shape(weight)]
        out = _in_tiles(rows, weight.size(0), tiles, lambda tile, some: tile.linear(some, weight))
        return out if bias is None else out.add_(bias)

    def gated(self, rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        tiles = self._gated[_shape(gate_up)]
        return _in_tiles(rows, down.size(0), tiles, lambda tile, some: tile.gated(some, gate_up, down, gelu=self._gelu))

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(rows, weight, eps)  # row by row, whatever their number


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.size(0), weight.size(1)


def _in_tiles(
    rows: Tensor, num_outputs: int, tiles: Sequence[Tile], compute: Callable[[Tile, Tensor], Tensor]
) -> Tensor:
    """Computes all rows, tile by tile; the last one is padded."""
    num_rows = rows.size(0)
    tile = _next_tile(tiles, num_rows)
    if tile.num_tokens == num_rows and not tile.by_columns:
        return compute(tile, rows)
    out, start = rows.new_empty((num_rows, num_outputs)), 0
    while start < num_rows:
        tile = _next_tile(tiles, num_rows - start)
        some = rows[start : start + tile.num_tokens]
        missing = tile.num_tokens - len(some)
        padded = F.pad(some, (0, 0, 0, missing)) if missing else some
        out[start : start + len(some)] = compute(tile, padded)[: len(some)]
        start += len(some)
    return out


def _next_tile(tiles: Sequence[Tile], num_left: int) -> Tile:
    """The smallest tile that holds what is left, unless too much of it would be padding: then the largest full one."""
    larger = next((tile for tile in tiles if tile.num_tokens >= num_left), None)
    if larger is not None and num_left < larger.num_tokens * (1 - _MOST_PADDING) and larger.num_tokens > _FEW_TOKENS:
        larger = next((tile for tile in reversed(tiles) if tile.num_tokens <= num_left), larger)
    return larger or tiles[-1]


def _one_of_each_size(tiles: Iterable[Tile]) -> list[Tile]:
    """Ascending; rows where there are both."""
    return sorted({tile.num_tokens: tile for tile in sorted(tiles, reverse=True)}.values())


def _alike(weight: Tensor, *, after_gate: bool = False, most_tokens: int | None = None) -> list[Tile]:
    """The candidates that give the bits of `BASE` with a weight of this shape, and `BASE`, ascending.

    :param most_tokens: of a candidate; None tries all.
    :param after_gate: columns come from a product of columns, so that each of them is spread over memory.
    :raises ConfigError: not even `BASE` does, when rows change places.
    """
    candidates = [tile for tile in _CANDIDATES if most_tokens is None or tile.num_tokens <= most_tokens]
    rows, weight = _telling(weight, max(2 * BASE.num_tokens, *(tile.num_tokens for tile in candidates)))
    parts = (rows[start : start + BASE.num_tokens] for start in range(0, len(rows), BASE.num_tokens))
    expected = torch.cat([BASE.linear(part, weight) for part in parts])
    if not torch.equal(BASE.linear(rows[1 : BASE.num_tokens + 1], weight), expected[1 : BASE.num_tokens + 1]):
        raise ConfigError(
            "engine.batch_invariant: in this machine's products of matrices a row's last bits depend on its place; "
            "set it to false"
        )

    def is_alike(tile: Tile) -> bool:
        some = rows[: tile.num_tokens]
        if after_gate and tile.by_columns:
            some = some.t().contiguous().t()
        return torch.equal(tile.linear(some, weight), expected[: tile.num_tokens])

    return sorted(tile for tile in candidates if tile == BASE or is_alike(tile))


def _telling(weight: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns so many rows, and a weight of this shape, whose products show in which order they were summed.

    The second half of each sum takes back what the first half has added. What is left is the rounding of all
    intermediate sums: with another order, nearly every element differs.
    """
    num_outputs, num_inputs = weight.shape
    generator = torch.Generator().manual_seed(0)

    def drawn(num_rows: int, sign: int) -> Tensor:
        half = torch.randn((min(num_rows, _MAX_DRAWN), num_inputs // 2), generator=generator)
        odd = torch.ones((len(half), num_inputs % 2))
        some = torch.cat((half, sign * half, odd), dim=1).to(weight.device, weight.dtype)
        return some[torch.arange(num_rows, device=weight.device) % len(some)]

    return drawn(num_rows, 1), drawn(num_outputs, -1)
