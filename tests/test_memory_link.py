"""One connection to a pool's memory, shared by threads: whose answer is whose, and what a failure means for others."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.errors import InvalidInputError, LimitExceededError
from kvtier.testing.blocks import TENANT
from kvtier.tiers import memfd
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.memory_link import MemoryLink, Session
from kvtier.tiers.slab import slab_bytes
from kvtier.wire.address import Address
from kvtier.wire.block import MAX_HEADER_BYTES, Fields, HeadEncoder, Verb, decode_header
from kvtier.wire.block_socket import FrameSocket
from kvtier.wire.stream import PlainStream

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")
WAIT_S = 10.0
Serve = Callable[[FrameSocket, Fields], None]


def greet(frames: FrameSocket) -> None:
    hello, _ = frames.receive_head(deadline=time.monotonic() + WAIT_S)
    greeting = {"versions": [1], "version": 1, "tenant": TENANT, "lease_ms": 1000, "max_held_bytes": 1 << 20}
    answer(frames, hello, **greeting)


def answer(frames: FrameSocket, request: Fields, descriptors: tuple[int, ...] = (), **fields: object) -> None:
    header = {"id": request.number("id"), "result": "ok", **fields}
    frames.send_frame(header, deadline=time.monotonic() + WAIT_S, descriptors=descriptors)


class Pool:
    """A pool that says what a test wants, over every connection in turn."""

    def __init__(self, path: Path, serve: Serve) -> None:
        self._serve = serve
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.address = f"unix:{path}"
        self.num_connections = 0
        self._connections: list[FrameSocket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with ThreadPoolExecutor() as threads, contextlib.suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                self.num_connections += 1
                frames = FrameSocket(PlainStream(connected))
                self._connections.append(frames)
                threads.submit(self._converse, frames)

    def _converse(self, frames: FrameSocket) -> None:
        with contextlib.suppress(OSError):
            greet(frames)
            while frames.wait():
                request, _ = frames.receive_head(deadline=time.monotonic() + WAIT_S)
                self._serve(frames, request)
        frames.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for frames in self._connections:
            frames.shut_down()
        self._thread.join(WAIT_S)
        self._listener.close()
        assert not self._thread.is_alive()


@contextlib.contextmanager
def linked(folder: Path, serve: Serve) -> Iterator[tuple[MemoryLink, Pool]]:
    pool = Pool(folder / "pool.sock", serve)
    link = MemoryLink(lambda deadline: PoolConnection.open(Address.parse(pool.address), "token", TENANT, deadline))
    try:
        yield link, pool
    finally:
        link.close()
        pool.close()


def soon() -> float:
    return time.monotonic() + WAIT_S


def echo(frames: FrameSocket, request: Fields) -> None:
    answer(frames, request, lease=request.number("lease"))


def test_threads_that_share_a_connection_get_their_own_answers(tmp_path: Path) -> None:
    with linked(tmp_path, echo) as (link, pool), ThreadPoolExecutor(8) as threads:

        def ask(i: int) -> int:
            _, got = link.ask(Verb.ACQUIRE, {"lease": i}, soon())
            return got.number("lease")

        assert list(threads.map(ask, range(2000))) == list(range(2000))
        assert pool.num_connections == 1


def test_requests_are_sent_ahead_of_answers_and_may_be_received_in_any_order(tmp_path: Path) -> None:
    with linked(tmp_path, echo) as (link, _):
        requests = [link.send(Verb.ACQUIRE, {"lease": i}, soon()) for i in range(5)]
        for i in (3, 0, 4, 1, 2):
            assert link.receive(requests[i], soon()).number("lease") == i


def test_whoever_waits_receives_for_a_thread_that_does_not(tmp_path: Path) -> None:
    """A thread that copies blocks has asked before one that waits."""
    with linked(tmp_path, echo) as (link, _), ThreadPoolExecutor(1) as other:
        early = link.send(Verb.PREPARE, {"lease": 1}, soon())
        _, late = other.submit(link.ask, Verb.ACQUIRE, {"lease": 2}, soon()).result(WAIT_S)
        assert late.number("lease") == 2
        assert link.receive(early, time.monotonic()).number("lease") == 1, "it is there already: no time is needed"


def test_an_answer_that_is_late_ends_the_connection_for_all_who_wait_on_it(tmp_path: Path) -> None:
    may_answer = threading.Event()

    def serve(frames: FrameSocket, request: Fields) -> None:
        if request.text("verb") == Verb.PREPARE:
            may_answer.wait(WAIT_S)
        echo(frames, request)

    with linked(tmp_path, serve) as (link, pool), ThreadPoolExecutor(1) as other:
        hurried = link.send(Verb.PREPARE, {"lease": 1}, soon())
        waiting = other.submit(link.ask, Verb.ACQUIRE, {"lease": 2}, soon())
        with pytest.raises(TimeoutError):
            link.receive(hurried, time.monotonic() + 0.2)
        _, got = waiting.result(WAIT_S)
        assert got.number("lease") == 2, "asked again over a fresh connection"
        may_answer.set()
        assert pool.num_connections == 2
        with pytest.raises(ConnectionError):
            link.receive(hurried, soon())


def test_a_close_waits_for_nobody_and_wakes_up_all(tmp_path: Path) -> None:
    may_answer = threading.Event()
    with (
        linked(tmp_path, lambda frames, request: may_answer.wait(WAIT_S)) as (link, _),
        ThreadPoolExecutor(3) as others,
    ):
        session = link.session_by(soon())
        waiting = [others.submit(session.receive, session.send(Verb.ACQUIRE, {}, soon()), soon()) for _ in range(3)]
        start = time.monotonic()
        link.close()
        for future in waiting:
            with pytest.raises(ConnectionError):
                future.result(WAIT_S)
        assert time.monotonic() - start < WAIT_S / 2
        may_answer.set()


def test_a_descriptor_goes_to_the_request_that_it_answers(tmp_path: Path) -> None:
    """Answers that come together may bring descriptors together, too."""
    slot_bytes, num_slots = 4096, 4
    nbytes = slab_bytes(slot_bytes, num_slots, shared=True)
    slabs = [memfd.create(f"slab-{i}", nbytes) for i in range(2)]
    for i, slab in enumerate(slabs):
        os.pwrite(slab, bytes([i + 1]) * slot_bytes, 0)
    requests: list[Fields] = []

    def serve(frames: FrameSocket, request: Fields) -> None:
        requests.append(request)
        if len(requests) < 3:
            return
        for asked in requests:
            if asked.text("verb") == Verb.MAP:
                shape = {"num_slots": num_slots, "slot_bytes": slot_bytes, "writable": 0}
                answer(frames, asked, (slabs[asked.number("slab")],), **shape)
            else:
                answer(frames, asked, lease=7)

    with linked(tmp_path, serve) as (link, _):
        session = link.session_by(soon())
        first = session.send(Verb.MAP, {"slab": 1}, soon())
        between = session.send(Verb.ACQUIRE, {"lease": 7}, soon())
        last = session.send(Verb.MAP, {"slab": 0}, soon())
        assert session.receive(last, soon()).number("num_slots") == num_slots
        assert session.receive(between, soon()).number("lease") == 7
        for request, content in ((first, 2), (last, 1)):
            assert request.descriptor is not None
            assert os.pread(request.descriptor, 1, 0) == bytes([content])
            os.close(request.descriptor)
    for slab in slabs:
        os.close(slab)


def test_a_slab_without_its_descriptor_is_an_error_and_maps_nothing(tmp_path: Path) -> None:
    def serve(frames: FrameSocket, request: Fields) -> None:
        answer(frames, request, num_slots=4, slot_bytes=4096, writable=0)

    with linked(tmp_path, serve) as (link, _):
        session: Session = link.session_by(soon())
        with pytest.raises(InvalidInputError, match="without a descriptor"):
            link.map(session, {3}, soon())
        assert not session.slabs


def test_a_head_that_is_too_long_does_not_spoil_the_next_one() -> None:
    heads = HeadEncoder()
    with pytest.raises(LimitExceededError):
        heads.encode({"hashes": bytes(MAX_HEADER_BYTES)})
    with pytest.raises(TypeError):
        heads.encode({"hashes": object()})
    assert decode_header(heads.encode({"id": 1})[16:]).number("id") == 1
