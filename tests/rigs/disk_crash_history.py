"""What may be in a disk tier, by what clients said who worked on it at the same time."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.tiers.base import WriteStatus

_FORGETS = ("discard", "purge")


@dataclass(slots=True)
class _Call:
    """Something that a client has said it is about to do. Times are numbers of lines."""

    what: str
    blocks: Sequence[int]
    began: int
    forgotten: Sequence[int]
    """`_Block.forgotten` of each of them when it began."""
    ended: float = math.inf
    """Infinite: it was not answered."""
    stored: list[int] = field(default_factory=list)
    """Blocks that a write was told are there now."""


@dataclass(slots=True)
class _Block:
    """What is known of one block."""

    written: dict[str, float] = field(default_factory=dict)
    """Versions that may have been stored, and when their writes ended; infinite: not yet."""
    forgotten: int = 0
    """When the latest call began that was to forget it, and was answered: what was written before is gone."""


class History:
    """The history of one folder, over all processes that work on it one after the other.

    Whatever order calls took effect in, each did so between its two lines. So a version must be gone if a call that
    forgets the block began after the write had ended, and was answered. Calls that overlap may have come in any order.
    Where a newer version was evicted, an older one may be found: where keys are hashes of contents, they are the same.
    """

    def __init__(self) -> None:
        self._now = 0
        self._blocks: defaultdict[int, _Block] = defaultdict(_Block)
        self._calls: dict[str, _Call] = {}
        """All of this process, by name."""

    def hear(self, what: str, name: str, words: Sequence[object] = ()) -> None:
        """A client's line. Raises `AssertionError` if the client was given what it must not be."""
        self._now += 1
        assert what != "raised", f"call {name} raised {words}"
        if name not in self._calls:
            self._begin(what, name, words)  # type: ignore[arg-type]
            return
        call = self._calls[name]
        call.ended = self._now
        if call.what == "write":
            self._wrote(call, name, words)  # type: ignore[arg-type]
        elif call.what == "read":
            self._got(call, name, words)  # type: ignore[arg-type]
        else:
            for block in call.blocks:
                known = self._blocks[block]
                known.forgotten = max(known.forgotten, call.began)

    def killed(self) -> None:
        """What was under way is over, one way or the other."""
        self._now += 1
        for known in self._blocks.values():
            ended = {version: min(end, self._now) for version, end in known.written.items()}
            known.written = {version: end for version, end in ended.items() if end > known.forgotten}

    def newest(self, nbytes: int, size_of: Callable[[int], int]) -> set[int]:
        """Blocks that must be there, as nobody forgets them and so few bytes are written: of this process."""
        writes = sorted((c for c in self._calls.values() if c.what == "write"), key=lambda c: -c.began)
        forgets = [call for call in self._calls.values() if call.what in _FORGETS]
        newest: set[int] = set()
        for write in writes:
            if sum(sum(map(size_of, other.blocks)) for other in writes if other.ended > write.began) > nbytes:
                break
            touched = {block for forget in forgets if forget.ended > write.began for block in forget.blocks}
            newest |= set(write.stored) - touched
        return newest

    def found(self, block: int, version: str | None) -> None:
        """What a start found after the kill. Raises `AssertionError` if that cannot be."""
        known = self._blocks[block]
        if version is None:
            known.written.clear()
        else:
            self._is_allowed(block, version, known.forgotten)

    def next_process(self) -> None:
        """Another one works on the folder."""
        self._calls.clear()

    def _begin(self, what: str, name: str, blocks: Sequence[int]) -> None:
        known = [self._blocks[block] for block in blocks]
        self._calls[name] = _Call(what, blocks, self._now, [block.forgotten for block in known])
        if what == "write":
            for block in known:
                block.written[name] = math.inf

    def _wrote(self, call: _Call, name: str, statuses: Sequence[str]) -> None:
        for block, status in zip(call.blocks, statuses, strict=True):
            written = self._blocks[block].written
            if status == WriteStatus.EXISTS.name:
                del written[name]
                continue
            written[name] = call.ended  # one that failed may be on disk all the same
            if status == WriteStatus.STORED.name:
                call.stored.append(block)

    def _got(self, call: _Call, name: str, versions: Sequence[str | None]) -> None:
        for block, forgotten, version in zip(call.blocks, call.forgotten, versions, strict=True):
            if version is not None:
                self._is_allowed(block, version, forgotten)

    def _is_allowed(self, block: int, version: str, forgotten: int) -> None:
        written = self._blocks[block].written
        assert version in written, f"block {block} is there in version {version}: written or left are {written}"
        assert written[version] > forgotten, (
            f"block {block} is there in version {version}, written until line {written[version]} and forgotten by a "
            f"call that began at line {forgotten}"
        )
