"""LoRA adapters as a worker has loaded them: from what, and whether that is what the scheduler goes by."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from vllm.lora.request import LoRARequest

from kvtier_vllm.content.adapters import NO_SOURCE, AdapterSource, source_of


class LoadedAdapters:
    """One worker's, by vLLM's id, under which it keeps what it has loaded. The worker's main thread only.

    An adapter may be loaded again under its id: in place, or because it had to make room for others.
    """

    def __init__(self, on_other: Callable[[str], None]) -> None:
        """:param on_other: told, with the reason, that an adapter is another one than keys were made from."""
        self._on_other = on_other
        self._loaded: dict[int, AdapterSource] = {}
        self._expected: dict[int, AdapterSource] = {}
        """What the scheduler makes keys from: none of an adapter that it was told is another one."""
        self._untold: dict[int, AdapterSource] = {}

    @contextlib.contextmanager
    def loading(self, request: LoRARequest) -> Iterator[None]:
        """Surrounds vLLM's loading of this adapter. If that fails, it has what it had before."""
        before, number = source_of(request), request.lora_int_id
        last = self._loaded.get(number)
        yield
        self._loaded[number] = self._untold[number] = before if source_of(request) == before else NO_SOURCE
        if last is not None and self._loaded[number] != last:  # requests go on with this one that began with that one
            self._expected.pop(number, None)
            self._on_other(f"adapter {number} was loaded from other files than before, or in another way")
        else:
            self._compare(number)

    def expect(self, adapters: Mapping[int, AdapterSource]) -> None:
        """The scheduler makes keys from these. To be called before what it has sent with them."""
        self._expected.update(adapters)
        for number in adapters:
            self._compare(number)

    def take_untold(self) -> dict[int, AdapterSource]:
        """What was loaded since the last call, for the scheduler."""
        untold, self._untold = self._untold, {}
        return untold

    def _compare(self, number: int) -> None:
        expected, loaded = self._expected.get(number), self._loaded.get(number)
        if expected is not None and loaded is not None and expected != loaded:
            del self._expected[number]
            self._on_other(f"adapter {number} is not the one that its keys were made from")
