"""What the work of each engine costs: its own prices as far as they were learned, those of others of its kind else."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvtier_gateway.engines.engine import Engine
from kvtier_gateway.routing.values import DEFAULT_PRICES, Prices

_POOL_BYTES_PER_S = 2e9
"""The bandwidth of a pool from which nothing was fetched yet."""
_FRESH_S = 0.25
"""Seconds for which prices are used. They are learned from pages that are read every second or so."""


class _Learned(NamedTuple):
    token_s: float | None
    pool_bytes_per_s: float | None
    token_bytes: float | None


class PriceList:
    """Prices of engines: of what was not learned of one yet, the mean of those that serve the same models, and where
    nothing was learned at all, what an H200 with an 8 B model does. Event loop only."""

    def __init__(self) -> None:
        self._engines: Sequence[Engine] = ()
        self._prices: Mapping[Engine, Prices] = {}
        self._until_s = 0.0

    def of(self, engines: Sequence[Engine], now_s: float) -> Mapping[Engine, Prices]:
        """The prices of all engines; engines that cost the same share an object.

        :param engines: another list when engines come or go. O(engines) then, and four times a second.
        """
        if engines is not self._engines or now_s >= self._until_s:
            self._engines, self._prices, self._until_s = engines, _worked_out(engines), now_s + _FRESH_S
        return self._prices


def _worked_out(engines: Sequence[Engine]) -> dict[Engine, Prices]:
    own = {engine: _learned_of(engine) for engine in engines}
    of_kind: dict[frozenset[str], list[_Learned]] = {}
    for engine in engines:
        if engine.models:
            of_kind.setdefault(frozenset(engine.models), []).append(own[engine])
    means = {kind: _Learned(*map(_mean, zip(*each, strict=True))) for kind, each in of_kind.items()}
    same: dict[Prices, Prices] = {}
    prices = {}
    for engine in engines:
        mean = means[frozenset(engine.models)] if engine.models else own[engine]
        found = _prices(engine, _Learned(*map(_first_known, own[engine], mean)))
        prices[engine] = same.setdefault(found, found)
    return prices


def _learned_of(engine: Engine) -> _Learned:
    learned, form = engine.prices, engine.key_form
    block_bytes = None if form is None else learned.block_bytes
    token_bytes = None if form is None or block_bytes is None else block_bytes / form.tokens_per_block
    return _Learned(learned.token_s, learned.pool_bytes_per_s, token_bytes)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _first_known(own: float | None, mean: float | None) -> float | None:
    return mean if own is None else own


def _prices(engine: Engine, learned: _Learned) -> Prices:
    if learned == _Learned(None, None, None) and engine.key_form is None:
        return DEFAULT_PRICES
    prices = replace(DEFAULT_PRICES, pool_bytes_per_s=learned.pool_bytes_per_s or _POOL_BYTES_PER_S)
    if learned.token_s is not None:  # as a whole, whatever came before
        prices = replace(prices, token_s=learned.token_s, token_context_s=0.0, request_s=0.0)
    if learned.token_bytes is not None:
        prices = replace(prices, kv_bytes_per_token=max(1, round(learned.token_bytes)))
    return prices
