"""How a `FrameSocket` waits for the next frame: it looks for a moment, and sleeps where looking is no use."""

import socket
import time
from collections.abc import Callable, Sequence

import pytest

from kvtier.errors import InvalidInputError
from kvtier.net.stream import PlainStream
from kvtier.protocol import block_socket
from kvtier.protocol.block import HeadEncoder
from kvtier.protocol.block_socket import FrameSocket

LOOK_S = 2e-6
"""What a look and a turn for others take, on a core that nobody else wants."""


class Peer:
    """A stream, and the time: every `answers_after` looks there are bytes."""

    def __init__(self, answers_after: int) -> None:
        self.now = 0.0
        self.num_looks = self.num_sleeps = 0
        self._answers_after = answers_after

    def clock(self) -> float:
        return self.now

    def poll(self, into: memoryview) -> int | None:
        self.num_looks += 1
        self.now += LOOK_S
        return None if self.num_looks % self._answers_after else 1

    def wait(self, into: memoryview) -> int:
        self.num_sleeps += 1
        return 1

    def receive(self, into: Sequence[memoryview], *, fill: bool, deadline: float) -> int:
        raise AssertionError("nothing is asked for")

    def send(self, views: list[memoryview], start: int, descriptors: Sequence[int] = ()) -> int:
        raise AssertionError("nothing is sent")

    def make_few_calls(self, is_on: bool) -> None:
        pass

    end_sending = shut_down = close = lambda self: None


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Waits for a frame, so often."""

    def run(peer: Peer, times: int, *, few_calls: bool = False) -> None:
        monkeypatch.setattr(block_socket, "MONOTONIC", peer.clock)
        frames = FrameSocket(peer, spins=True)
        frames.make_few_calls(few_calls)
        for _ in range(times):
            assert frames.wait()
            frames._take(1)

    return run


def test_answers_that_come_soon_are_looked_for(waits: Callable[..., None]) -> None:
    peer = Peer(answers_after=5)
    waits(peer, 100)
    assert (peer.num_sleeps, peer.num_looks) == (0, 500)


def test_nobody_looks_for_what_does_not_come(waits: Callable[..., None]) -> None:
    peer = Peer(answers_after=1 << 30)
    waits(peer, 3)
    assert peer.num_sleeps == 3
    assert peer.num_looks < 3 * 30


def test_nobody_looks_where_calls_are_to_be_few(waits: Callable[..., None]) -> None:
    peer = Peer(answers_after=5)
    waits(peer, 3, few_calls=True)
    assert (peer.num_sleeps, peer.num_looks) == (3, 0)


@pytest.mark.parametrize(("is_on", "pieces"), [(False, [256 << 10] * 8), (True, [2 << 20])])
def test_where_calls_are_to_be_few_a_read_over_tcp_goes_out_in_one(is_on: bool, pieces: list[int]) -> None:
    class Taken(socket.socket):
        """Takes all that it is given."""

        def sendmsg(self, buffers: Sequence[memoryview], *ancillary: object) -> int:  # type: ignore[override]
            sizes.append(sum(map(len, buffers)))
            return sizes[-1]

        def send(self, data: memoryview) -> int:  # type: ignore[override]
            return self.sendmsg([data])

    sizes: list[int] = []
    frames = FrameSocket(PlainStream(Taken(socket.AF_INET)))
    frames.make_few_calls(is_on)
    frames._send([memoryview(bytes(256 << 10))] * 8, time.monotonic() + 10)
    assert sizes == pieces
    frames.close()


@pytest.mark.parametrize("payload", [(), (memoryview(bytes(1000)),)])
def test_the_last_two_answers_of_a_read_go_out_in_one_system_call(payload: tuple[memoryview, ...]) -> None:
    ours, theirs = map(PlainStream, socket.socketpair())
    sender, receiver = FrameSocket(ours), FrameSocket(theirs)
    deadline = time.monotonic() + 10
    sender.send_frame({"id": 1}, payload, deadline=deadline, then={"id": 2})
    came = theirs._socket.recv(1 << 20, socket.MSG_PEEK)
    for number, nbytes in ((1, sum(map(len, payload))), (2, 0)):
        head, payload_bytes = receiver.receive_head(deadline=deadline)
        assert (head.number("id"), payload_bytes) == (number, nbytes)
        receiver.receive_into([memoryview(bytearray(nbytes))], deadline=deadline)
    assert theirs.poll(memoryview(bytearray(1))) is None
    assert len(came) > 1000 * len(payload) + 30
    for end in (sender, receiver):
        end.close()


def test_whether_a_header_is_there_is_asked_without_waiting() -> None:
    """By an event loop: whatever has come so far, and wherever it was cut."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = PlainStream(ours)
        stream.for_event_loop()
        frames, encoder = FrameSocket(stream), HeadEncoder()
        wire = b"".join(bytes(encoder.encode({"id": number, "text": "x" * 50 * number})) for number in range(3))
        found = []
        for at in range(len(wire)):
            assert not frames.has_head()
            theirs.sendall(wire[at : at + 1])
            while frames.has_head():
                fields, _ = frames.receive_head(deadline=0.0)
                found.append(fields.number("id"))
        assert found == [0, 1, 2]
        theirs.sendall(wire * 2)  # several at once, and more than the room holds in several turns
        found.clear()
        while len(found) < 6:
            assert frames.has_head()
            found.append(frames.receive_head(deadline=0.0)[0].number("id"))
        assert found == [0, 1, 2] * 2
        theirs.sendall(encoder.encode({"id": 1, "text": "x" * (16 << 10)}))
        with pytest.raises(InvalidInputError):
            frames.has_head()
        theirs.close()


def test_an_end_is_told_apart_from_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = PlainStream(ours)
        stream.for_event_loop()
        frames = FrameSocket(stream)
        assert not frames.has_head()
        theirs.close()
        with pytest.raises(ConnectionResetError):
            frames.has_head()


def test_an_event_loop_does_not_wait_for_a_peer_that_receives_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = PlainStream(ours)
        stream.for_event_loop()
        frames = FrameSocket(stream)

        def fill() -> None:
            for _ in range(1 << 20):
                frames.send_frame({"text": "x" * 1000}, deadline=0.0)

        with pytest.raises(TimeoutError):
            fill()
