"""The conditions of `kvtier bench invariant`, under which the logits of a prompt must be the same bits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.build.tiers import DISK, POOL
from kvtier.errors import KvtierError
from kvtier.offload.messages import HOST

DEVICE = "device"
PREEMPTIONS = "preemptions"
TOKENS_PER_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine that begins with nothing on its device, and that is asked all prompts once for each condition."""

    engine: Mapping[str, Any]
    """Its table `engine`."""
    conditions: Mapping[str, str | None]
    """The names of the conditions, in order, each with what must have been counted under it: hits of a tier, or
    preemptions."""
    below: Sequence[str] = ()
    """The tiers below its host memory, which keep what an engine before it has left there."""
    has_little_room: bool = False
    """Whether its device holds few of the prompts."""


@dataclass(frozen=True, slots=True)
class Family:
    """Engines that need each other, in order."""

    settings: Sequence[Setting] = field(default_factory=tuple)

    @property
    def names(self) -> list[str]:
        """The names of all conditions."""
        return [name for setting in self.settings for name in setting.conditions]


_ALONE, _TOGETHER = {"max_running": 1}, {"max_running": 16}
REFERENCE = Setting({"cache": False, **_ALONE}, {"nothing cached, one at a time": None})
FAMILIES: Sequence[Family] = (
    Family([Setting({"cache": False, "max_batch_tokens": 17, **_ALONE}, {"in chunks of 17 tokens": None})]),
    Family([Setting({"cache": False, "max_batch_tokens": 100, **_TOGETHER}, {"16 at a time, in chunks of 100": None})]),
    Family([Setting({"cache": False, "max_running": 3}, {"3 at a time": None})]),
    Family([Setting({"cache": False, **_TOGETHER}, {"16 at a time, preempted": PREEMPTIONS}, has_little_room=True)]),
    Family([Setting(_TOGETHER, {"16 at a time": None, "16 at a time, device hits": DEVICE})]),
    Family(
        [
            Setting(_ALONE, {"while blocks are evicted": None, "host hits": HOST}, (POOL, DISK), has_little_room=True),
            Setting(_TOGETHER, {"16 at a time, pool hits": POOL}, (POOL,)),
            Setting(_ALONE, {"disk hits": DISK}, (DISK,)),
        ]
    ),
)


def chosen_families(only: Sequence[str] | None) -> list[Family]:
    """The families with a condition whose name contains any of these texts; all where there are none.

    :raises KvtierError: there is no such condition.
    """
    names = [name for family in FAMILIES for name in family.names]
    for part in only or ():
        if not any(part in name for name in names):
            raise KvtierError(f"no condition with {part} in its name: there are {', '.join(names)}")
    return [each for each in FAMILIES if not only or any(part in name for part in only for name in each.names)]
