"""Loads that copy layer after layer to a CUDA device, while the engine's stream waits for each layer in turn."""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.device.kv import Blocks, Fence

if TYPE_CHECKING:
    import torch


class CopiesByLayer(Protocol):
    """What a mover needs of `LayeredLoads`."""

    def scatter(self, blocks: Blocks, *, after: Fence | None, on_queued: Callable[[], None]) -> None:
        """Arena to device, the first layer of all blocks first. On return the bytes are on the device.

        :param after: what last used the device slots is before it.
        :param on_queued: called once, in the calling thread, when all copies are queued and `LayeredLoads.wait` knows
            of them: from then on the device slots are the engine's.
        """


QueueLayers = Callable[[Blocks, Fence | None, Callable[[Sequence[Any]], None]], None]
"""Queues copies of all layers in turn on a stream, and an event behind each; calls the function with the events, and
returns when all is done."""


class LayeredLoads:
    """Copies by layer of one device that are under way.

    `scatter` is called in the movers' threads, `wait` and `wait_for_all` in the engine's. Neither of the two blocks: it
    is the engine's stream that waits. As long as the engine calls `wait` before each layer of every forward pass, and
    `wait_for_all` before whatever else it queues that touches the KV, nothing sees a block that has not arrived, and
    nothing writes to a device slot that a copy will still write to, whichever request has the slot by then.
    """

    def __init__(self, device: "torch.device", num_layers: int, queue_layers: QueueLayers, *, cuda: Any) -> None:
        """:param cuda: `torch.cuda`, or what stands for it in tests."""
        self.num_layers = num_layers
        self._device, self._queue_layers, self._cuda = device, queue_layers, cuda
        self._lock = threading.Lock()
        self._under_way: dict[int, Sequence[Any]] = {}
        """The event behind each layer of each load, by the identity of the list. Guarded by _lock."""

    @property
    def are_under_way(self) -> bool:
        """Whether a forward pass that begins now may wait for a layer. Any thread."""
        with self._lock:
            return bool(self._under_way)

    def scatter(self, blocks: Blocks, *, after: Fence | None, on_queued: Callable[[], None]) -> None:
        known: list[int] = []

        def announce(events: Sequence[Any]) -> None:
            with self._lock:
                self._under_way[id(events)] = events
            known.append(id(events))
            on_queued()

        try:
            self._queue_layers(blocks, after, announce)
        finally:
            with self._lock:
                for each in known:
                    del self._under_way[each]

    def wait(self, layer: int) -> None:
        """What the engine's current stream does next sees this layer of all loads whose copies are queued."""
        with self._lock:
            events = [of_load[layer] for of_load in self._under_way.values()]
        if events:
            stream = self._cuda.current_stream(self._device)
            for event in events:
                stream.wait_event(event)

    def wait_for_all(self) -> None:
        """What the engine's current stream does next sees all layers of all loads whose copies are queued."""
        self.wait(self.num_layers - 1)
