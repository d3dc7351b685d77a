"""Paged KV of which layers may still be on their way to the device."""

from dataclasses import dataclass

from torch import Tensor

from kvtier.device.layered_loads import LayeredLoads
from kvtier_engine.model.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class ArrivingKV(PagedKV):
    """A forward pass over it waits on the device for each layer, when it comes to that layer. Scheduler thread only."""

    loads: LayeredLoads
    """The loads by layer into this KV."""

    def layer(self, index: int) -> Tensor:
        self.loads.wait(index)
        return PagedKV.layer(self, index)

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """Copies after all loads by layer, whose blocks `source` may be one of."""
        self.loads.wait_for_all()
        PagedKV.copy_tokens(self, source, target, num_tokens)

    @property
    def is_arriving(self) -> bool:
        return self.loads.are_under_way
