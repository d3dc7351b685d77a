"""The tier process: `python -m kvtier.tiers.sidecar.process CONTROL PARENT`.

Only `kvtier.tiers.sidecar.child` starts it.

CONTROL is the descriptor of a socket that brings descriptors: first the memory, then one socket per channel, each
served by a thread of its own. The process lives as long as that socket is open at the other end, and no longer than
its parent, whose process id is PARENT.
"""

import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping

from kvtier.clock import MONOTONIC
from kvtier.errors import InvalidInputError, KvtierError
from kvtier.events import EventSink
from kvtier.memory import memfd
from kvtier.memory.malloc import keep_freed_memory
from kvtier.metrics import Metrics
from kvtier.net.stream import PlainStream
from kvtier.protocol.block import Fields, trace_of
from kvtier.protocol.block_socket import FrameSocket
from kvtier.system.logs import set_up_logs, within_request
from kvtier.system.tracing import tracing
from kvtier.tiers.base import Tier
from kvtier.tiers.sidecar.event_relay import EventSender
from kvtier.tiers.sidecar.lease_table import LeaseTable
from kvtier.tiers.sidecar.messages import Verb, channel, pack_numbers, unpack_keys, unpack_numbers, unpack_places

MakeTiers = Callable[[str, EventSink, Metrics], list[Tier]]
"""Opens tiers from settings as text; what raises `KvtierError` is told to the engine."""

_PR_SET_PDEATHSIG = 1
_FOREVER = float("inf")
_ANSWER_S = 60.0
"""An engine that does not take an answer for so long has no use for it."""

_NICENESS = 5
"""The engine's steps come first if cores are short. Much more, and a fetch that a request waits for gets none."""
_MESSAGE_CHARS = 1000
"""Well below what a header takes."""

_log = logging.getLogger(__name__)


class TierServer:
    """The tiers of this process, and how requests reach them. Any thread."""

    def __init__(self, memory: memoryview) -> None:
        """:param memory: what payloads are read into and written from."""
        self._memory = memory
        self._metrics = Metrics()
        self._news = EventSender(self._metrics)
        self._lending = LeaseTable()
        self._tiers: dict[str, Tier] = {}
        """Set by the first request, before any other is made; not changed later."""

    def serve(self, frames: FrameSocket) -> None:
        """Answers the requests of one channel until it ends."""
        try:
            while frames.wait():
                request, _ = frames.receive_head(deadline=_FOREVER)
                if request.text("verb") == Verb.SHARE:
                    self._share(frames, request)
                else:
                    frames.send_frame(self._answer(request), deadline=MONOTONIC() + _ANSWER_S)
        except (OSError, KvtierError):
            _log.exception("a channel to the engine ended")
        finally:
            frames.close()

    def _answer(self, request: Fields) -> dict[str, object]:
        verb = request.text("verb")
        with tracing.within(trace_of(request)), within_request(request.text("request_id")):
            try:
                answer = {"error": "", **self._ask(verb, request)}
            except KvtierError as error:
                answer = {"error": type(error).__name__, "message": str(error)[:_MESSAGE_CHARS]}
            except Exception as error:
                # A bug of a tier. The engine takes it for one of a tier of its own: a miss, and a line in the log.
                _log.exception("%s failed", verb)
                message = f"{verb} failed in the tier process: {error!r}"
                answer = {"error": "KvtierError", "message": message[:_MESSAGE_CHARS]}
        number, news = self._news.take(all_counts=verb in (Verb.NEWS, Verb.CLOSE))
        return {**answer, "news_number": number, "news": news}

    def _share(self, frames: FrameSocket, request: Fields) -> None:
        """Answers with a slab that the engine may map, if it is there. It bears no news."""
        slab = self._lending.share(request.number("serial"))
        if slab is None:
            frames.send_frame({"num_slots": 0}, deadline=MONOTONIC() + _ANSWER_S)
            return
        try:
            fields = {"num_slots": slab.num_slots, "slot_bytes": slab.slot_bytes}
            frames.send_frame(fields, deadline=MONOTONIC() + _ANSWER_S, descriptors=[slab.descriptor])
        finally:
            os.close(slab.descriptor)

    def _ask(self, verb: str, request: Fields) -> Mapping[str, object]:  # noqa: C901 - one branch per verb
        if verb == Verb.OPEN:
            return self._open(request)
        if verb == Verb.NEWS:
            return {}
        if verb == Verb.CLOSE:
            for tier in self._tiers.values():
                tier.close()
            return {}
        if verb == Verb.RELEASE:
            self._lending.release(unpack_numbers(request.data("leases")))
            return {}
        if verb == Verb.SLABS:
            return {"ended": pack_numbers(self._lending.note_mapped(unpack_numbers(request.data("mapped"))))}
        tier = self._tiers[request.text("tier")]
        if verb == Verb.USAGE:
            usage = tier.usage()
            return {"usage": [usage.num_blocks, usage.used_bytes, usage.capacity_bytes]}
        if verb == Verb.CHECK:
            tier.check()
            return {}
        keys = unpack_keys(request.data("keys"))
        if verb == Verb.LOOKUP:
            return {"statuses": bytes(tier.lookup(keys))}
        if verb == Verb.DISCARD:
            return {"num_discarded": tier.discard(keys)}
        if verb == Verb.LEASE:
            verified = bool(request.number("verified"))
            return self._lending.lease(tier, keys, request.number("payload_bytes"), verified=verified)
        places = unpack_places(request.data("places"), len(keys), len(self._memory))
        views = [self._memory[offset : offset + length] for offset, length in places]
        if verb == Verb.READ:
            return {"statuses": bytes(tier.read(keys, views))}
        if verb == Verb.WRITE:
            checksums = unpack_numbers(request.data("checksums"))
            return {"statuses": bytes(tier.write(list(zip(keys, views, checksums, strict=True))))}
        raise InvalidInputError(f"no such verb: {verb}")

    def _open(self, request: Fields) -> Mapping[str, object]:
        set_up_logs(request.number("log_level"), "json" if request.text("log_format") == "json" else "text")
        module, _, name = request.text("factory").partition(":")
        make: MakeTiers = getattr(importlib.import_module(module), name)
        self._tiers = {
            tier.name: tier for tier in make(request.data("settings").decode(), self._news.on_event, self._metrics)
        }
        return {}


def serve(control: socket.socket) -> None:
    """Takes the memory and channels from `control`, until it ends."""
    stream = PlainStream(control, takes_descriptors=True)
    frames = FrameSocket(stream)
    server: TierServer | None = None
    while frames.wait():
        head, _ = frames.receive_head(deadline=_FOREVER)
        while (descriptor := stream.take_descriptor()) is not None:
            if server is None:
                server = TierServer(memfd.map_descriptor(descriptor, head.number("memory_bytes"), writable=True))
                os.close(descriptor)
                continue
            arguments = (channel(socket.socket(fileno=descriptor)),)
            threading.Thread(target=server.serve, args=arguments, name="kvtier-channel", daemon=True).start()


def main() -> None:
    """Ends the process without ceremony: who closes the control socket in good order has closed the tiers before."""
    # The engine decides when this ends, not a Ctrl-C or a service manager's signal to all of its processes: what it
    # still has to write at its end goes through here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICENESS)
    keep_freed_memory()
    control, parent = int(sys.argv[1]), int(sys.argv[2])
    if os.getppid() == parent:  # or it has died before it could be watched
        set_up_logs()
        try:
            serve(socket.socket(fileno=control))
        except (OSError, KvtierError):
            _log.exception("the tier process ends")
    os._exit(0)


if __name__ == "__main__":
    main()
