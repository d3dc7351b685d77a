"""A model and its adapters, of which each sequence of a step has its own."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvtier_engine.model.llama import Chunk
from kvtier_engine.model.paged_kv import PagedKV
from kvtier_engine.scheduling.scheduler import Model


class AdaptedModel:
    """Computes the sequences of each adapter by themselves, one after the other, as if they were alone in the step."""

    def __init__(self, base: Model, adapted: Mapping[str, Model]) -> None:
        """:param adapted: the model with the adapter added, by the adapter's name."""
        self._models: dict[str | None, Model] = {None: base}
        for name, model in adapted.items():
            self._models[name] = model

    def forward(self, chunks: Sequence[Chunk], kv: PagedKV) -> Tensor:
        """Computes what `LlamaModel.forward` does, each chunk with the adapter that it names."""
        rows: dict[str | None, list[int]] = {}
        for row, chunk in enumerate(chunks):
            rows.setdefault(chunk.adapter, []).append(row)
        parts = [self._models[name].forward([chunks[row] for row in some], kv) for name, some in rows.items()]
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([row for some in rows.values() for row in some], device=parts[0].device)
        # Replayed graphs overwrite what they gave before: all parts are copied before the next step.
        together = torch.cat(parts)
        return torch.empty_like(together).index_copy_(0, order, together)
