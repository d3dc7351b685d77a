"""The protocol of strategies, which is also their base: what a strategy leaves out does nothing."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from kvtier_gateway.routing.values import Candidate, Choice, EngineId, Key, KvEvent, Prompt, Reads, RequestId


class Strategy(Protocol):
    """Chooses engines. Not safe for threads: its owner calls it from one, in the order in which things happen.

    No method blocks or raises for what engines or clients did. Times are seconds on the caller's clock, which never
    runs backwards. For every request there is one `choose`; then `sent`, at most one `first_token`, and one of
    `finished` and `failed`, all with its id. A request that is sent again to another engine first `failed`, and has
    another id then. What the methods other than `choose` are told of unknown requests or engines has no effect.
    Each of these does nothing where a strategy leaves it out.
    """

    reads: ClassVar[Reads] = Reads.NOTHING
    """What `Prompt` has to hold. A prompt without it is still served, as one of which nothing is cached."""
    follows_events: ClassVar[bool] = False
    """Whether `kv_event` does anything."""

    def expect(self, keys: Sequence[Key], engines: Sequence[EngineId]) -> None:
        """Hears that a prompt with these keys may come next, for one of these engines: what takes long can be looked up
        while the pool is asked. Changes no choice."""
        return

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> Choice:
        """Returns one of the candidates, of which there is at least one. Changes nothing that later choices depend on,
        except turns and random numbers."""

    def sent(self, request: RequestId, prompt: Prompt, choice: Choice, now_s: float) -> None:
        """Notes that the request goes to the chosen engine, against which it counts at once."""
        return

    def first_token(self, request: RequestId, now_s: float) -> None:
        """Notes that the first token of the answer is there."""
        return

    def finished(self, request: RequestId, now_s: float) -> None:
        """Notes that the answer is complete, or that its client left."""
        return

    def failed(self, request: RequestId, now_s: float) -> None:
        """Notes that the engine refused the request or broke off."""
        return

    def engine_left(self, engine: EngineId) -> None:
        """Forgets the content and the requests under way of an engine that is gone or came back empty."""
        return

    def kv_event(self, engine: EngineId, event: KvEvent) -> None:
        """Notes what an engine has told of what it holds."""
        return
