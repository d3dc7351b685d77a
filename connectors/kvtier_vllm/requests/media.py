"""Requests whose media are still being hashed: nothing of theirs is loaded or saved, and none has begun."""

from dataclasses import dataclass

from vllm.v1.request import Request

from kvtier.clock import Clock
from kvtier_vllm import request_hashes
from kvtier_vllm.content.media import AwaitedMedia, Media
from kvtier_vllm.requests.known_requests import KnownRequest


@dataclass(slots=True)
class _Unnamed:
    known: KnownRequest
    media: AwaitedMedia
    asked_since: float | None = None
    """When vLLM first wanted to begin with it."""


class RequestMedia:
    """Scheduler thread only. Nothing blocks."""

    def __init__(self, media: Media, *, patience_s: float, clock: Clock) -> None:
        """:param patience_s: how long a request waits for what its media are."""
        self._media, self._patience_s, self._clock = media, patience_s, clock
        self._unnamed: dict[str, _Unnamed] = {}
        """The requests whose media have no names yet, by id."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unnamed

    def admit(self, known: KnownRequest) -> bool:
        """Whether all is known that its keys depend on; if not, it is here, or nothing can be kept of it."""
        media = self._media.digests(known.request)
        if media is None:
            return False
        if media.is_ready:
            return self._name(known, media)
        self._unnamed[known.request.request_id] = _Unnamed(known, media)
        return False

    def is_worth_waiting(self, request: Request) -> bool:
        """Whether one that is here should not begin yet."""
        unnamed = self._unnamed[request.request_id]
        # vLLM does not wait with those that want nothing from caches.
        if unnamed.media.is_ready or request.skip_reading_prefix_cache:
            return False
        now = self._clock()
        unnamed.asked_since = unnamed.asked_since if unnamed.asked_since is not None else now
        return now < unnamed.asked_since + self._patience_s

    def take(self, request_id: str) -> KnownRequest | None:
        """One that was here; None when it is still not known what its media are: it goes on by itself."""
        unnamed = self._unnamed.pop(request_id)
        if unnamed.media.is_ready and self._name(unnamed.known, unnamed.media):
            return unnamed.known
        return None

    def drop(self, request_id: str) -> None:
        """It has ended, whether it is here or not."""
        self._unnamed.pop(request_id, None)

    def forget(self) -> None:
        """Nothing of those that are here is kept: what their keys would say has changed meanwhile."""
        self._unnamed.clear()

    def _name(self, known: KnownRequest, media: AwaitedMedia) -> bool:
        """False: one of them could not be read.

        Also vLLM calls them by their content from now on. By the names that clients give, it may take what its encoder
        made of one for the other, and that would be saved.
        """
        told = self._media.take(media)
        if told:
            request_hashes.name_media(known.request, known.keys.depend_on(told))
        return told is not None
