"""A request of a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_gateway.routing.values import Choice, Key


@dataclass(slots=True)
class SimRequest:
    """What it asks for, and what became of it. Simulation only."""

    number: int
    arrives_s: float
    keys: Sequence[Key]
    """The keys of its full blocks of which at least one token comes after."""
    prompt_tokens: int
    answer_tokens: int
    session: str
    all_ids: Sequence[int]
    """The ids of all blocks, with that which is a part."""
    choice: Choice | None = None
    num_held: int = 0
    """Leading blocks that were on the device when it was admitted."""
    cached: int = 0
    """Leading blocks that it does not compute."""
    num_private: int = 0
    fetched_again: bool = False
    first_token_s: float = 0.0
