"""`oracle`: the rule of `priced` by one who knows what is true in the simulation: backlogs, content, and bandwidth."""

from collections.abc import Mapping, Sequence

from kvtier_gateway.fleet.engine import SimEngine
from kvtier_gateway.routing.kv_index import Runs
from kvtier_gateway.routing.priced import Offer, Priced
from kvtier_gateway.routing.values import Candidate, EngineId, Prompt


class Oracle(Priced):
    """Takes nothing from events, metrics or answers."""

    follows_events = False

    def __init__(self, engines: Mapping[EngineId, SimEngine], seed: int = 0) -> None:
        super().__init__(seed)
        self._engines = engines

    def offers(self, prompt: Prompt, candidates: Sequence[Candidate], now_s: float) -> list[Offer]:
        """Offers at the true bandwidth of the pool."""
        prices = [self._engines[candidate.engine].true_prices() for candidate in candidates]
        told = [candidate._replace(prices=price) for candidate, price in zip(candidates, prices, strict=True)]
        return super().offers(prompt, told, now_s)

    def content(self, prompt: Prompt, candidates: Sequence[Candidate]) -> list[Runs]:
        """What is there now."""
        keys, found = prompt.keys or (), []
        for candidate in candidates:
            engine = self._engines[candidate.engine]
            device = engine.device.run(keys)
            found.append(Runs(device, engine.local_run(keys, device)))
        return found

    def backlog_s(self, engine: EngineId, now_s: float) -> float:
        """What the engine has still to compute."""
        return self._engines[engine].backlog_s()
