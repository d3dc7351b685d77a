"""A connection that is nothing but bytes in memory: what a peer says is fixed, what it is told is kept."""

from collections.abc import Sequence

_MOST_SENT_BYTES = 64 << 20
"""More than any answer to a request of these targets."""


class FeedStream:
    """`kvtier.net.stream.Stream` whose peer has said it all and closed. One thread."""

    def __init__(self, data: bytes, step: int) -> None:
        """:param step: the most bytes that one call receives."""
        self._data, self._step, self._at = memoryview(data), step, 0
        self.sent = bytearray()
        """All that the peer was told."""

    def wait(self, into: memoryview) -> int:
        return self.receive([into], fill=False, deadline=0.0)

    def poll(self, into: memoryview) -> int | None:
        return self.wait(into)

    def receive(self, into: Sequence[memoryview], *, fill: bool, deadline: float) -> int:
        count = 0
        for view in into:
            part = self._data[self._at : self._at + min(len(view), self._step - count)]
            view[: len(part)] = part
            self._at += len(part)
            count += len(part)
            if len(part) < len(view):
                break
        return count

    def send(self, views: list[memoryview], start: int, descriptors: Sequence[int] = ()) -> int:
        count = sum(map(len, views[start:]))
        for view in views[start:]:
            self.sent += view
        assert len(self.sent) <= _MOST_SENT_BYTES, "answers without end"
        return count

    def make_few_calls(self, is_on: bool) -> None:
        pass

    def end_sending(self) -> None:
        pass

    def shut_down(self) -> None:
        pass

    def close(self) -> None:
        pass
