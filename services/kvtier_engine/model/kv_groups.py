"""KV groups: layers of one kind have blocks of their own, so that windowed layers need none for what they see no more.

A block holds as many layers as attend to all tokens. These are the full group. Windowed layers fill as many groups of
the same size as they need, of which the last one may have places to spare. So every block has the same size, and one
block pool hands blocks out to all groups, as in vLLM V1 (`vllm/v1/core/kv_cache_utils.py`, 0.32).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kvtier_engine.model.model_config import ModelConfig

_FULL = 0


@dataclass(frozen=True)
class KVGroups:
    """Which layers share a block. As it is by default, all layers do, and attend to all tokens."""

    num_layers: int | None = None
    """Layers of a block; None: all of the model."""
    places: tuple[tuple[int, int], ...] = ()
    """Each layer's group, and its place in this group's blocks. The full group is 0. Empty: one group."""
    window: int | None = None
    """How many tokens layers of other groups see, their own among them; None: there are no such groups."""

    @classmethod
    def of(cls, config: ModelConfig) -> "KVGroups":
        """The groups of a model: one, unless layers of both kinds are there."""
        num_windowed = sum(config.windowed_layers)
        size = config.num_hidden_layers - num_windowed
        if not num_windowed or not size or config.sliding_window is None:
            return ONE_GROUP
        return cls(size, tuple(_places(config.windowed_layers, size)), config.sliding_window)

    @cached_property
    def num_windowed(self) -> int:
        """How many groups have windowed layers: all but the full one."""
        return max((group for group, _ in self.places), default=_FULL)

    def group(self, layer: int) -> int:
        """The group of a layer."""
        return self.places[layer][0] if self.places else _FULL

    def place(self, layer: int) -> int:
        """Which of the layers of its blocks a layer is."""
        return self.places[layer][1] if self.places else layer

    def blocks_seen(self, tokens_per_block: int) -> int:
        """How many blocks before its own a windowed layer's token may see into, wherever in its block it stands."""
        return 0 if self.window is None else -(-(self.window - 1) // tokens_per_block)

    def blocks_ahead(self, tokens_per_block: int) -> int:
        """How many blocks of a windowed group a sequence has room for beyond the one it computes into: one window."""
        return 0 if self.window is None else -(-self.window // tokens_per_block)

    def room(self, num_blocks: int, tokens_per_block: int) -> int:
        """How many tokens a sequence may have that has so many blocks for itself."""
        of_window = self.blocks_seen(tokens_per_block) + 1 + self.blocks_ahead(tokens_per_block)
        most = max(num_blocks // (1 + self.num_windowed), num_blocks - self.num_windowed * of_window)
        return most * tokens_per_block


ONE_GROUP = KVGroups()
"""Every block has all layers."""


def _places(windowed_layers: tuple[bool, ...], size: int) -> Iterator[tuple[int, int]]:
    counts = {True: 0, False: 0}
    for is_windowed in windowed_layers:
        group, place = divmod(counts[is_windowed], size)
        counts[is_windowed] += 1
        yield (group + 1 if is_windowed else _FULL), place
