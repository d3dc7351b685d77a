"""Images and other media by the content that the model gets: vLLM names them by a counter, or as a client likes."""

import hashlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from vllm.v1.request import Request

from kvtier.system.started_threads import started_threads
from kvtier_vllm import compat

_log = logging.getLogger(__name__)
_LABEL = b"kvtier.vllm.medium.v1\n"
_AT_ONCE_BYTES = 1 << 20
"""The most bytes of media per request that the scheduler's thread hashes itself (0.7 ms); another one hashes more."""

_Digest = Future[bytes | str]
"""The digest of a medium, or why there is none: an exception would keep what its frames hold, such as the content."""


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium of a request: an image, a video, audio."""

    digest: bytes
    """32 bytes of all that decides what the model makes of it, but for where it is."""
    offset: int
    """The position of the medium's first token in the prompt."""


@dataclass(frozen=True, slots=True)
class AwaitedMedia:
    """All media of one request, some of which may still be hashed."""

    features: Sequence[MultiModalFeatureSpec]
    digests: Sequence[_Digest]
    """The digests of the media's content, in the order of `features`."""

    @property
    def is_ready(self) -> bool:
        return all(digest.done() for digest in self.digests)


class Media:
    """The digests of requests' media. Scheduler thread only; another one hashes what is large."""

    def __init__(self, encoder: str, refused: Mapping[str, str]) -> None:
        """
        :param encoder: what decides what becomes of media, beside them and the model.
        :param refused: kinds of which nothing is kept, and why.
        """
        self._encoder, self._refused = encoder, refused
        self._known: dict[int, tuple[weakref.ref[MultiModalKwargsItem], _Digest]] = {}
        """Digests by the media object, as long as a request or vLLM's cache of processed media has it."""
        self._warned: set[str] = set()
        self._thread = started_threads(1, "kvtier-media")

    def digests(self, request: Request) -> AwaitedMedia | None:
        """None: nothing can be kept of the request, because content of its media is not here, or says too little."""
        items: list[MultiModalKwargsItem] = []
        for feature in request.mm_features:
            why_not = self._refused.get(feature.modality) or _why_not(feature)
            if why_not is not None or feature.data is None:
                self._warn(f"{feature.modality}: {why_not}")
                return None
            items.append(feature.data)
        num_bytes = sum(tensor.nbytes for item in items for tensor in _tensors(item))
        digests = [self._digest(item, at_once=num_bytes <= _AT_ONCE_BYTES) for item in items]
        return AwaitedMedia(request.mm_features, digests)

    def take(self, awaited: AwaitedMedia) -> list[Medium] | None:
        """What they are, when they are ready. None: one of them could not be read."""
        media = []
        for feature, digest in zip(awaited.features, awaited.digests, strict=True):
            content = digest.result()
            if isinstance(content, str):
                self._warn(f"{feature.modality}: {content}")
                return None
            state = hashlib.sha256(_LABEL + f"{self._encoder!r} {feature.modality!r}\n".encode() + content)
            position = feature.mm_position
            _update(state, [position.length, *([] if position.is_embed is None else [position.is_embed])])
            media.append(Medium(state.digest(), position.offset))
        return media

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _digest(self, item: MultiModalKwargsItem, *, at_once: bool) -> _Digest:
        # Never by a name: only that nothing has changed an object makes its digest the same.
        key = id(item)
        known = self._known.get(key)
        if known is not None and known[0]() is item:
            return known[1]
        digest: _Digest = Future()
        if at_once:
            digest.set_result(_content(item))
        else:
            digest = self._thread.submit(_content, item)
        forgotten = self._known
        self._known[key] = weakref.ref(item, lambda _: forgotten.pop(key, None)), digest
        return digest

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("nothing is kept of requests with %s", what)


def _why_not(feature: MultiModalFeatureSpec) -> str | None:
    """Why the feature cannot be told by its content."""
    if feature.modality not in compat.MEDIA:
        return "not a kind of media that kvtier knows"
    if feature.data is None:
        return "no data in the scheduler's process"
    for leaf in _leaves(feature.data):
        if not isinstance(leaf, (Tensor, int, float)):
            return f"data of type {type(leaf).__name__}"
        if isinstance(leaf, Tensor) and not _is_plain(leaf):
            return f"{leaf.layout} data of {leaf.dtype} on {leaf.device.type}"
    # Sizes alone, as of embeddings that are elsewhere, or the address of a --mm-processor-cache-type shm.
    if sum(tensor.numel() for tensor in _tensors(feature.data)) < feature.mm_position.get_num_embeds():
        return "not the content in the scheduler's process, only what describes it"
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are all that it is, and can be read here."""
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, MultiModalKwargsItem):
        for element in value.values():
            yield from _leaves(element.data)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _tensors(item: MultiModalKwargsItem) -> Iterator[Tensor]:
    return (leaf for leaf in _leaves(item) if isinstance(leaf, Tensor))


def _content(item: MultiModalKwargsItem) -> bytes | str:
    """SHA-256 of all fields with their names, or why it cannot be had. Any thread."""
    state = hashlib.sha256(_LABEL)
    try:
        for name in sorted(item):
            state.update(f"{name!r}\n".encode())
            _update(state, item[name].data)
    except (RuntimeError, MemoryError) as error:
        return f"content that cannot be read ({type(error).__name__})"
    return state.digest()


def _update(state: "hashlib._Hash", value: object) -> None:
    """Each value with its type and size first: so no two make the same bytes. Lists and tuples are the same, as they
    are for vLLM between processes."""
    if isinstance(value, Tensor):
        state.update(f"{value.dtype} {list(value.shape)}\n".encode())
        state.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, (list, tuple)):
        state.update(f"list {len(value)}\n".encode())
        for each in value:
            _update(state, each)
    else:
        state.update(f"{type(value).__name__} {value!r}\n".encode())
