"""LoRA adapters as a worker has loaded them: from which files, and whether these are what the scheduler goes by."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from vllm.lora.request import LoRARequest

from kvtier_vllm.content.adapters import AdapterFiles, files_of


class LoadedAdapters:
    """One worker's, by vLLM's id, under which it keeps what it has loaded. The worker's main thread only.

    An adapter may be loaded again under its id: in place, or because it had to make room for others.
    """

    def __init__(self, on_other: Callable[[str], None]) -> None:
        """:param on_other: told, with the reason, that an adapter is another one than keys were made from."""
        self._on_other = on_other
        self._loaded: dict[int, AdapterFiles] = {}
        self._expected: dict[int, AdapterFiles] = {}
        """What the scheduler makes keys from: none of an adapter that it was told is another one."""
        self._untold: dict[int, AdapterFiles] = {}

    @contextlib.contextmanager
    def loading(self, request: LoRARequest) -> Iterator[None]:
        """While vLLM loads this adapter. If that fails, it has what it had before."""
        folder, number = Path(request.lora_path), request.lora_int_id
        before, last = files_of(folder), self._loaded.get(number)
        yield
        self._loaded[number] = self._untold[number] = before if files_of(folder) == before else ()
        if last is not None and self._loaded[number] != last:  # vLLM has KV of both under one name
            self._expected.pop(number, None)
            self._on_other(f"adapter {number} was loaded from other files than before")
        else:
            self._compare(number)

    def expect(self, adapters: Mapping[int, AdapterFiles]) -> None:
        """The scheduler makes keys from what was in these files. To be called before what it has sent with them."""
        self._expected.update(adapters)
        for number in adapters:
            self._compare(number)

    def take_untold(self) -> dict[int, AdapterFiles]:
        """What was loaded since the last call, for the scheduler."""
        untold, self._untold = self._untold, {}
        return untold

    def _compare(self, number: int) -> None:
        expected, loaded = self._expected.get(number), self._loaded.get(number)
        if expected is not None and loaded is not None and expected != loaded:
            del self._expected[number]
            self._on_other(f"adapter {number} was loaded from other files than its keys were made from")
