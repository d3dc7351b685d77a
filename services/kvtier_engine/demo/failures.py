"""What becomes of cached KV when its pool stops, dies, or is another one."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvtier.errors import KvtierError
from kvtier_engine.demo.ask import Answer, chat, forget
from kvtier_engine.demo.paths import Document, Messages
from kvtier_engine.demo.site import Site, wait_until

_ANSWER_TOKENS = 12
_UNDER_WAY_S = 0.05
_FOUND_AGAIN_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Return:
    """A pool that is there again, and what an engine got from it first."""

    ready_s: float
    """Seconds from its start until it was ready."""
    found_again_s: float
    """Seconds from then until an engine hit it, without any restart of the engine."""
    answer: Answer
    """The answer to a question about a document that the engine itself has forgotten."""
    blocks_by_source: dict[str, int]
    """Blocks that the pool read for that answer, by where it had them."""

    @property
    def away_s(self) -> float:
        """Seconds from its start until an engine hit it."""
        return self.ready_s + self.found_again_s


@dataclass(frozen=True, slots=True)
class Death:
    """A pool killed by SIGKILL, and the requests that met it."""

    under_way: Answer
    after: Answer
    back: Return


class Failures:
    """Stops and kills the site's pool. `shared` and `remote` are URLs of engines, by their way to it; one thread."""

    def __init__(self, site: Site, shared: str, remote: str, documents: list[Document]) -> None:
        self._site, self._shared, self._remote = site, shared, remote
        self._documents = documents
        self._probe: Messages = [{"role": "user", "content": "the quick brown fox " * 100}]

    def prepare(self) -> None:
        """Computes the short prompt by which it is seen that the pool is there again."""
        self._site.expect(chat(self._shared, self._probe, 1))
        self._site.settle()

    def restart(self) -> Return:
        """SIGTERM, and the same pool again: its memory is gone, its disk is not."""
        self._site.stop()
        return self._back("pool-disk")

    def kill(self) -> Death:
        """SIGKILL while one engine is about to read from the pool; then the other asks."""
        for url in (self._shared, self._remote):
            forget(url)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(chat, self._remote, self._documents[0].question(1), _ANSWER_TOKENS)
            time.sleep(_UNDER_WAY_S)
            self._site.kill()
            under_way = asked.result()
        after = chat(self._shared, self._documents[1].question(1), _ANSWER_TOKENS)
        return Death(under_way, after, self._back("pool-disk"))

    def move(self) -> Return:
        """Another pool, as on another host: nothing on its disk, and the same Redis."""
        self._site.stop()
        return self._back("another-disk")

    def _back(self, disk: str) -> Return:
        ready_s = self._site.start(disk)
        begin = time.monotonic()
        if not wait_until(self._hits, _FOUND_AGAIN_WITHIN_S):
            raise KvtierError(f"no engine has found the pool again within {_FOUND_AGAIN_WITHIN_S:.0f} s of its start")
        found_again_s = time.monotonic() - begin
        before = self._site.read_blocks()
        answer = chat(self._shared, self._documents[-1].question(1), _ANSWER_TOKENS)
        read = {source: int(count - before.get(source, 0)) for source, count in self._site.read_blocks().items()}
        return Return(ready_s, found_again_s, answer, {source: count for source, count in read.items() if count})

    def _hits(self) -> bool:
        forget(self._shared)
        return chat(self._shared, self._probe, 1).cached_by_tier.get("pool", 0) > 0
