"""LoRA adapters by their content: their names and paths say nothing of the KV that comes of them."""

import hashlib
import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from kvtier.errors import ConfigError
from kvtier.identity.weights_digest import weights_digest
from kvtier.system.started_threads import started_threads

_log = logging.getLogger(__name__)
_LABEL = b"kvtier.vllm.adapter.v1"
_CONFIG = "adapter_config.json"
_SAYS_NOTHING = frozenset(("base_model_name_or_path", "revision", "inference_mode"))
"""Fields of an adapter's configuration that say where things come from, not what is computed."""

AdapterFiles = tuple[tuple[str, int, int, int], ...]
"""Path, size and times of each: other content has others. Empty: nobody can tell which content it is."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """What an adapter is loaded from, and how."""

    files: AdapterFiles
    is_3d: bool
    """`LoRARequest.is_3d_lora_weight`: the same bytes are another adapter."""


NO_SOURCE = AdapterSource((), is_3d=False)
"""The source of an adapter whose content cannot be told."""


@dataclass(slots=True)
class _Adapter:
    source: AdapterSource
    """The adapter's files when it was first asked for. The workers compare them with what they load."""
    digest: "Future[bytes | str]"
    """The digest, or why there is none: an exception would keep what its frames hold, such as a mapped file."""
    is_trusted: bool = True
    is_unsent: bool = True
    """Whether no key was made from the digest."""


class Adapters:
    """The digests of an engine's adapters. Scheduler thread only; another thread hashes, and nobody waits for it."""

    def __init__(self, digests: Path, use: str) -> None:
        """
        :param digests: folder in which digests are remembered.
        :param use: what decides what the engine makes of an adapter, beside its content.
        """
        self._digests, self._use = digests, use.encode()
        self._known: dict[int, _Adapter] = {}
        """The adapters that requests have used, by the id under which vLLM keeps what it has loaded."""
        self._loaded: dict[int, AdapterSource] = {}
        """What a worker said last that it has loaded, by vLLM's id of the adapter."""
        self._unsent: dict[int, AdapterSource] = {}
        """The adapters in use that the workers were not told of, by vLLM's id."""
        self._thread = started_threads(1, "kvtier-adapters")

    def digest(self, request: LoRARequest) -> bytes | None:
        """The digest of the adapter's weights and configuration. None: not known yet, or KV cannot be kept by it.

        That is so for adapters that are not a local folder of safetensors files, for those that vLLM has loaded from
        other files or in another way, and for those whose files have changed since they were first used: which of both
        vLLM computes with, nobody can say before it loads them again.
        """
        source, number = source_of(request), request.lora_int_id
        if not source.files or self._loaded.get(number, source) != source:
            return None
        known = self._known.get(number)
        if known is None:
            future = self._thread.submit(_digest, Path(request.lora_path), source.files, self._digests)
            known = self._known[number] = _Adapter(source, future)
        if known.is_trusted and known.source != source:
            _log.warning("%s has changed while it is in use: nothing is kept of it", request.lora_path)
            known.is_trusted = False
        if not known.is_trusted or not known.digest.done():
            return None
        digest = known.digest.result()
        if isinstance(digest, str):
            _log.warning("nothing is kept of adapter %s: %s", request.lora_name, digest)
            known.is_trusted = False
            return None
        if known.is_unsent:
            known.is_unsent, self._unsent[number] = False, source
        return hashlib.sha256(digest + bytes([source.is_3d]) + self._use).digest()

    def note_loaded(self, adapters: Mapping[int, AdapterSource]) -> None:
        """A worker has loaded these, perhaps in place of others under their ids."""
        for number, source in adapters.items():
            self._loaded[number] = source
            known = self._known.get(number)
            if known is not None and known.source != source:
                del self._known[number]

    def take_unsent(self) -> dict[int, AdapterSource]:
        """Returns the sources of keys that were first made since the last call: the workers compare them."""
        unsent, self._unsent = self._unsent, {}
        return unsent

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def source_of(request: LoRARequest) -> AdapterSource:
    """What vLLM would load for this request at this moment."""
    return AdapterSource(files_of(Path(request.lora_path)), bool(request.is_3d_lora_weight))


def files_of(folder: Path) -> AdapterFiles:
    """The adapter's files as they are now. Empty: not an adapter that can be told by its content."""
    try:
        paths = sorted(folder.glob("*.safetensors"))
        stats = [(path, path.stat()) for path in [folder / _CONFIG, *paths]] if paths else []
    except OSError:
        return ()
    return tuple((str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats)


def _digest(folder: Path, files: AdapterFiles, digests: Path) -> bytes | str:
    try:
        weights = weights_digest(sorted(folder.glob("*.safetensors")), digests)
        config: dict[str, Any] = json.loads((folder / _CONFIG).read_text())
        arithmetic = {name: value for name, value in config.items() if name not in _SAYS_NOTHING}
    except (ConfigError, OSError, ValueError, AttributeError) as error:
        return str(error)
    if files_of(folder) != files:
        return f"{folder} has changed while it was read"
    return hashlib.sha256(_LABEL + weights + json.dumps(arithmetic, sort_keys=True).encode()).digest()
