"""Which of many names a server of a Redis has, for as few commands as possible."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.tiers.redis.commands import Command
from kvtier.tiers.redis.exchange import Accepts, Conversation

_NAMES_AT_ONCE = 64
"""Names of one command. More: more of them are asked for one by one where a run of hits ends. Fewer: more commands,
each of which takes some microseconds of the interpreter."""


@dataclass(frozen=True, slots=True)
class Presence:
    """Places of names, by what a server says of them."""

    there: list[int] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    """The name is with another server of the Cluster."""


def presence(talk: Conversation, names: Sequence[bytes], accepts: Accepts = lambda answer: False) -> Presence:
    """Asks one server for names. What blocks of a prompt are there is a run from the first on, mostly: names go into
    one command together, which says how many are there, and are asked for one by one only if it is some of them. A
    Cluster takes no such commands: there each name is a command.

    :param accepts: refusals that leave the names unanswered; others are raised. See `Conversation.ask`.
    """
    step = 1 if talk.in_cluster else _NAMES_AT_ONCE
    answer = Presence()
    some: list[int] = []

    def take(run: range, count: Any) -> None:
        if count == 0:
            answer.absent.extend(run)
        elif count == len(run):
            answer.there.extend(run)
        elif isinstance(count, int):
            some.extend(run)

    runs = [range(start, min(start + step, len(names))) for start in range(0, len(names), step)]
    commands: list[Command] = [("EXISTS", *names[run.start : run.stop]) for run in runs]
    moved = talk.ask(commands, lambda i, count: take(runs[i], count), accepts)
    answer.moved.extend(place for i in moved for place in runs[i])
    if some and step > 1:
        singles = [range(place, place + 1) for place in some]
        talk.ask([("EXISTS", names[run.start]) for run in singles], lambda i, n: take(singles[i], n), accepts)
    return answer
