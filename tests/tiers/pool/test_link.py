"""One connection to a pool's memory, shared by threads: whose answer is whose, and what a failure means for others."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import InvalidInputError, LimitExceededError, UnavailableError
from kvtier.memory import memfd
from kvtier.memory.slab_layout import slab_bytes
from kvtier.net.address import Address
from kvtier.protocol.block import MAX_HEADER_BYTES, Fields, HeadEncoder, Verb, decode_header
from kvtier.protocol.block_socket import FrameSocket
from kvtier.testing.blocks import TENANT
from kvtier.tiers.pool.connection import PoolConnection
from kvtier.tiers.pool.shared_memory.link import MemoryLink
from kvtier.tiers.pool.shared_memory.session import Session
from memory_link_rig import WAIT_S, Pool, Serve, answer
from pool_rig import until
from threads_rig import no_more_threads

pytestmark = pytest.mark.skipif(not memfd.available(), reason="shared memory needs Linux")


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
            _, got = link.ask(Verb.ACQUIRE, {"lease": i}, 1, soon())
            return got.number("lease")

        assert list(threads.map(ask, range(2000))) == list(range(2000))
        assert pool.num_connections == 1


def test_whoever_receives_finds_a_request_that_is_being_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread without room receives for one that has not sent all of its request."""
    waiting: list[tuple[int, int]] = []
    send_with = PoolConnection.send_with

    def send(connection: PoolConnection, *arguments: Any) -> None:
        waiting.append((len(session._unanswered), len(connection._unanswered)))
        send_with(connection, *arguments)

    def make_header(connection: PoolConnection, *arguments: Any) -> Any:
        waiting.append((len(session._unanswered), len(connection._unanswered)))
        return header_of(connection, *arguments)

    with linked(tmp_path, echo) as (link, _):
        session, header_of = link.session_by(soon()), PoolConnection.header_of
        monkeypatch.setattr(PoolConnection, "send_with", send)
        monkeypatch.setattr(PoolConnection, "header_of", make_header)
        requests = [session.send(Verb.ACQUIRE, {"lease": i}, 1, soon()) for i in range(2)]
        assert waiting == [(0, 0), (1, 1), (1, 1), (2, 2)]
        for request in requests:
            session.receive(request, soon())


def test_without_a_thread_that_watches_there_is_no_session(tmp_path: Path) -> None:
    with linked(tmp_path, echo) as (link, pool):
        with no_more_threads("kvtier-pool-end"):
            for _ in range(2):
                with pytest.raises(UnavailableError, match="no thread to watch"):
                    link.session_by(soon())
        assert link.session_by(soon()) is link.session_by(soon())
        assert pool.num_connections == 3


def test_requests_are_sent_ahead_of_answers_and_may_be_received_in_any_order(tmp_path: Path) -> None:
    with linked(tmp_path, echo) as (link, _):
        session = link.session_by(soon())
        requests = [session.send(Verb.ACQUIRE, {"lease": i}, 1, soon()) for i in range(5)]
        for i in (3, 0, 4, 1, 2):
            assert session.receive(requests[i], soon()).number("lease") == i


def test_whoever_waits_receives_for_a_thread_that_does_not(tmp_path: Path) -> None:
    """A thread that copies blocks has asked before one that waits."""
    with linked(tmp_path, echo) as (link, _), ThreadPoolExecutor(1) as other:
        session = link.session_by(soon())
        early = session.send(Verb.PREPARE, {"lease": 1}, 1, soon())
        _, late = other.submit(link.ask, Verb.ACQUIRE, {"lease": 2}, 1, soon()).result(WAIT_S)
        assert late.number("lease") == 2
        assert session.receive(early, time.monotonic()).number("lease") == 1, "it is there already: no time is needed"


def test_requests_wait_for_answers_when_many_blocks_are_asked_for(tmp_path: Path) -> None:
    """Else both sides might fill the sockets' buffers, and wait for each other to read."""
    most, num_sent = 0, 0
    num_answered = 0
    seen = threading.Semaphore(0)

    def serve(frames: FrameSocket, request: Fields) -> None:
        nonlocal num_answered
        seen.acquire(timeout=WAIT_S)
        num_answered += 1
        echo(frames, request)

    with linked(tmp_path, serve) as (link, _), ThreadPoolExecutor(1) as other:
        session = link.session_by(soon())

        def send_all() -> None:
            nonlocal most, num_sent
            for i in range(12):
                session.send(Verb.ACQUIRE, {"lease": i}, 1000, soon())
                num_sent += 1
                most = max(most, num_sent - num_answered)

        sending = other.submit(send_all)
        for _ in range(12):
            seen.release()
            time.sleep(0.01)
        sending.result(WAIT_S)
        assert most <= 3


def test_an_answer_that_is_late_for_who_receives_ends_the_connection_for_all(tmp_path: Path) -> None:
    may_answer = threading.Event()

    def serve(frames: FrameSocket, request: Fields) -> None:
        if request.text("verb") == Verb.PREPARE:
            may_answer.wait(WAIT_S)
        echo(frames, request)

    with linked(tmp_path, serve) as (link, pool), ThreadPoolExecutor(1) as other:
        session = link.session_by(soon())
        hurried = session.send(Verb.PREPARE, {"lease": 1}, 1, soon())
        receiving = other.submit(session.receive, hurried, time.monotonic() + 0.3)
        until(lambda: session._receiving or receiving.done())
        _, got = link.ask(Verb.ACQUIRE, {"lease": 2}, 1, soon())
        assert got.number("lease") == 2, "asked again over a fresh connection"
        with pytest.raises(TimeoutError):
            receiving.result(WAIT_S)
        may_answer.set()
        assert pool.num_connections == 2
        with pytest.raises(ConnectionError):
            session.receive(hurried, soon())


def test_a_late_lease_and_a_late_descriptor_are_given_back(tmp_path: Path) -> None:
    may_answer = threading.Event()
    released: list[int] = []
    nbytes = slab_bytes(4096, 4, shared=True)
    slab = memfd.create("slab", nbytes)

    def serve(frames: FrameSocket, request: Fields) -> None:
        verb = request.text("verb")
        if verb == Verb.RELEASE:
            released.append(request.number("lease"))
            return
        may_answer.wait(WAIT_S)
        if verb == Verb.MAP:
            answer(frames, request, (slab,), num_slots=4, slot_bytes=4096, writable=0)
        else:
            answer(frames, request, lease=request.number("lease"))

    with linked(tmp_path, serve) as (link, pool), ThreadPoolExecutor(1) as other:
        session = link.session_by(soon())
        first = session.send(Verb.ACQUIRE, {"lease": 1}, 1, soon())
        receiving = other.submit(session.receive, first, soon())
        until(lambda: session._receiving)
        late = session.send(Verb.ACQUIRE, {"lease": 2}, 1, soon())
        mapped = session.send(Verb.MAP, {"slab": 0}, 0, soon())
        for request in (late, mapped):
            with pytest.raises(TimeoutError):
                session.receive(request, time.monotonic() + 0.05)
            session.abandon(request, soon())
        may_answer.set()
        assert receiving.result(WAIT_S).number("lease") == 1, "nobody else's lateness ends it"
        assert link.ask(Verb.ACQUIRE, {"lease": 3}, 1, soon())[1].number("lease") == 3
        assert mapped.answer is not None
        assert mapped.descriptor is None, "closed"
        until(lambda: bool(released))
        assert released == [2]
        assert pool.num_connections == 1
    os.close(slab)


def test_a_refusal_is_raised_where_it_belongs(tmp_path: Path) -> None:
    def serve(frames: FrameSocket, request: Fields) -> None:
        if request.text("verb") == Verb.PREPARE:
            refusal = {"id": request.number("id"), "result": "limit_exceeded", "message": "too many", "versions": [1]}
            frames.send_frame(refusal, deadline=soon())  # and does not close: who watches for that might be first
            return
        if request.number("lease") != 2:
            echo(frames, request)

    with linked(tmp_path, serve) as (link, _):
        session = link.session_by(soon())
        good = session.send(Verb.ACQUIRE, {"lease": 1}, 1, soon())
        refused = session.send(Verb.PREPARE, {}, 1, soon())
        behind = session.send(Verb.ACQUIRE, {"lease": 2}, 1, soon())
        with pytest.raises(ConnectionError):
            session.receive(behind, soon())
        with pytest.raises(LimitExceededError, match="too many"):
            session.receive(refused, soon())
        assert session.receive(good, soon()).number("lease") == 1
        assert link.ask(Verb.ACQUIRE, {"lease": 3}, 1, soon())[1].number("lease") == 3


def test_a_close_waits_for_nobody_and_wakes_up_all(tmp_path: Path) -> None:
    may_answer = threading.Event()

    def serve(frames: FrameSocket, request: Fields) -> None:
        may_answer.wait(WAIT_S)

    with linked(tmp_path, serve) as (link, _), ThreadPoolExecutor(3) as others:
        session = link.session_by(soon())
        requests = [session.send(Verb.ACQUIRE, {}, 1, soon()) for _ in range(3)]
        waiting = [others.submit(session.receive, request, soon()) for request in requests]
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
        first = session.send(Verb.MAP, {"slab": 1}, 0, soon())
        between = session.send(Verb.ACQUIRE, {"lease": 7}, 1, soon())
        last = session.send(Verb.MAP, {"slab": 0}, 0, soon())
        assert session.receive(last, soon()).number("num_slots") == num_slots
        assert session.receive(between, soon()).number("lease") == 7
        for request, content in ((first, 2), (last, 1)):
            assert request.descriptor is not None
            assert os.pread(request.descriptor, 1, 0) == bytes([content])
            os.close(request.descriptor)
    for slab in slabs:
        os.close(slab)


def test_descriptors_that_nobody_asked_for_end_the_session(tmp_path: Path) -> None:
    slab = memfd.create("slab", 4096)

    def serve(frames: FrameSocket, request: Fields) -> None:
        answer(frames, request, (slab, slab), lease=0)

    refused = pytest.raises(InvalidInputError, match="2 descriptors that nobody asked for")
    with linked(tmp_path, serve) as (link, _), refused:
        link.ask(Verb.ACQUIRE, {}, 1, soon())
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
