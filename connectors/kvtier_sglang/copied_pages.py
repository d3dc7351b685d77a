"""KV that comes and goes as copies of whole pages: SGLang's interface without addresses."""

from collections.abc import Sequence

import torch

from kvtier.errors import InvalidInputError
from kvtier_sglang.host_pages import Lent, tensor_bytes
from kvtier_sglang.page_kinds import PageKind
from kvtier_sglang.page_store import Lend, PageStore
from kvtier_sglang.pending_pages import PendingPages
from kvtier_sglang.pools import HostPools


class CopiedPages:
    """Pages in tensors of the caller. Any thread. `InvalidInputError`: no host pool yet, or pages that do not match."""

    def __init__(self, store: PageStore, pools: HostPools, owed: PendingPages) -> None:
        """All are the caller's."""
        self._store, self._pools, self._owed = store, pools, owed

    def is_there(self, name: str) -> bool:
        """Whether the pool has a page, as a copy or as SGLang writes it by addresses."""
        anchor = self._pools.anchor
        kinds = [anchor.kind, self._pools.flat_kind(anchor.blank_page().nbytes)]
        return any(there for (there,) in self._store.present([(kind, [name]) for kind in kinds if kind is not None]))

    def read(self, names: Sequence[str], targets: Sequence[torch.Tensor] | None) -> list[torch.Tensor | None]:
        """Fills tensors, new ones if none are given; None for what is missing, or was not read any more after that."""
        into = list(targets) if targets is not None else [self._pools.anchor.blank_page() for _ in names]
        whole = [target.contiguous() for target in into]  # itself, or a copy that goes back
        got = self._store.read(self._kind(whole), names, _lender(whole), self._store.begin_by())
        for target, copy, hit in zip(into, whole, got, strict=True):
            if hit and copy.data_ptr() != target.data_ptr():
                target.copy_(copy)
        return [target if hit else None for target, hit in zip(into, got, strict=True)]

    def write(self, names: Sequence[str], pages: Sequence[torch.Tensor]) -> list[bool]:
        """Writes what is in tensors; see `PageStore.write`."""
        if not self._pools.anchor.is_writer:
            return [True] * len(names)
        whole = [page.contiguous() for page in pages]
        return self._store.write(self._kind(whole), names, _lender(whole), self._store.begin_by(), self._owed)

    def _kind(self, pages: Sequence[torch.Tensor]) -> PageKind:
        sizes = {page.nbytes for page in pages}
        if len(sizes) != 1:
            raise InvalidInputError(f"pages of {sorted(sizes)} bytes: all must be of one size")
        return self._pools.flat_kind(sizes.pop())


def _lender(pages: Sequence[torch.Tensor]) -> Lend:
    buffers = [[tensor_bytes(page)] for page in pages]
    return lambda places: Lent([buffers[i] for i in places], lambda: None)
