"""What steps of an engine do to its KV, and the queue of steps that the device has."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from kvtier_bench.gpu.races.chip import Chip
from kvtier_bench.gpu.races.pages import Pages, Places

Queues = Callable[[], None]
"""Queues work of a step on the current stream."""
_AHEAD = 2
"""How many steps are queued: the one that runs, and the next."""


class Steps:
    """The steps that an engine has queued. It waits for the oldest one only, as engines do that schedule ahead."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self._ends: deque[Any] = deque()
        """The event at the end of each step that is queued."""

    @property
    def num_queued(self) -> int:
        """How many steps nobody has waited for yet."""
        return len(self._ends)

    def queue(self, *work: Queues, tail: Sequence[Queues] = ()) -> None:
        """Queues a step, and marks its end. The tail follows, which nobody waits for, like drafting in vLLM."""
        for queues in work:
            queues()
        end = self._chip.cuda.Event()
        end.record(self._chip.cuda.current_stream(self._chip.device))
        self._ends.append(end)
        for queues in tail:
            queues()

    def process(self, *, at_most_ahead: int = _AHEAD) -> None:
        """Waits until so few steps are queued."""
        while len(self._ends) > at_most_ahead:
            self._ends.popleft().synchronize()


class Work:
    """Makes the work of steps. Its methods return what queues it. One thread."""

    def __init__(self, chip: Chip, pages: Pages) -> None:
        self._chip, self._pages = chip, pages
        self._last_content = 0
        self._graph: tuple[list[Places], Tensor, Queues] | None = None
        """The places and contents that the captured step reads, which live as long as it does, and its replay."""

    def contents(self, blocks: Sequence[int]) -> list[int]:
        """New contents for these blocks."""
        first = self._last_content + 1
        self._last_content += len(blocks)
        return list(range(first, self._last_content + 1))

    def hold_up(self, seconds: float) -> Queues:
        """Work that keeps the device busy for so long."""
        return lambda: self._chip.hold_up(seconds)

    def write(self, blocks: Sequence[int], contents: Sequence[int]) -> Queues:
        """Work that computes these contents."""
        into, what = self._pages.places(blocks), self._pages.index(contents)
        return lambda: self._chip.launch(lambda: self._pages.write(into, what))

    def zero(self, blocks: Sequence[int]) -> Queues:
        """Work that clears blocks."""
        into = self._pages.places(blocks)
        return lambda: self._chip.launch(lambda: self._pages.zero(into))

    def check(self, number: int, blocks: Sequence[int], contents: Sequence[int]) -> Queues:
        """Work that compares blocks with these contents, in the round of that number."""
        where, what = self._pages.places(blocks), self._pages.index(contents)
        return lambda: self._chip.launch(lambda: self._pages.check(where, what, number))

    def check_layers(
        self, number: int, blocks: Sequence[int], contents: Sequence[int], num_layers: int, wait: Callable[[int], None]
    ) -> list[Queues]:
        """`check` layer by layer. Before each, the current stream is made to wait for it."""
        where, what = self._pages.places(blocks), self._pages.index(contents)
        size = self._pages.part_words // num_layers

        def check(layer: int) -> None:
            words = slice(layer * size, (layer + 1) * size)
            wait(layer)
            self._chip.launch(lambda: self._pages.check(where, what, number, words))

        return [partial(check, layer) for layer in range(num_layers)]

    def replay(self, blocks: Sequence[int], contents: Sequence[int]) -> Queues:
        """Work like that of `write`, for the first KV group, by a graph that is captured once.

        Tensors that stay in their place say which blocks get which contents. There are as many blocks each time.
        """
        if self._graph is None:
            places, what = self._pages.places(range(len(blocks))), self._pages.index([0] * len(blocks))
            self._chip.cuda.synchronize(self._chip.device)
            self._graph = places, what, self._chip.capture(lambda: self._pages.write(places, what))
        places, what, replay = self._graph
        new_into, new_what = self._pages.index(blocks), self._pages.index(contents)

        def update() -> None:
            places[0].blocks.copy_(new_into)
            what.copy_(new_what)

        def queues() -> None:
            self._chip.launch(update)
            replay()

        return queues
