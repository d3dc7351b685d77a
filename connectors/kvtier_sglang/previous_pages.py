"""Pages that the pool has under a previous secret of the tenant: how they are found, until a read has brought them."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from kvtier.identity.keys import BlockKey, NamespaceId
from kvtier_sglang.page_keys import Namer, PageKeys
from kvtier_sglang.page_kinds import KeysOf, PageKind, Wanted

_MOST_NAMES = 1 << 16
"""Pages whose previous names are kept for reads, about 300 bytes each. One that was forgotten is computed."""
_Page = tuple[tuple[NamespaceId, ...], str]


class PreviousPages:
    """The pages that queries have found under a previous secret. Any thread."""

    def __init__(self, keys: PageKeys) -> None:
        self._keys = keys
        self._lock = threading.Lock()
        self._names: OrderedDict[_Page, Namer] = OrderedDict()
        """What names them, those that were found longest ago first. Guarded by _lock."""

    def search(
        self, wanted: Wanted, answers: list[list[bool]], ask: Callable[[Wanted, KeysOf], list[list[bool]]]
    ) -> list[list[bool]]:
        """Looks for pages that are missing under the previous secrets, and returns the answers with what it finds.

        The first and the last page that each kind lacks are looked for under each secret, in one question; the newest
        secret that has one of them is asked for all. So pages that nobody has cost two keys for each secret.

        :param answers: which pages are there under the present secret.
        :param ask: asks the pool for pages by the keys that these names make.
        """
        namers = self._keys.under_previous()
        missing = [
            [name for name, is_there in zip(names, there, strict=True) if not is_there]
            for (_, names), there in zip(wanted, answers, strict=True)
        ]
        if not namers or not any(missing):
            return answers
        kinds = [kind for kind, _ in wanted]
        ends = [(kind, [*names[:1], *names[1:][-1:]]) for kind, names in zip(kinds, missing, strict=True)]
        for namer in namers:
            keys_of = partial(_keys_by, namer)
            if any(map(any, ask(ends, keys_of))):
                found = ask(list(zip(kinds, missing, strict=True)), keys_of)
                return [
                    self._with_found(kind, names, there, namer, dict(zip(lacked, more, strict=True)))
                    for (kind, names), there, lacked, more in zip(wanted, answers, missing, found, strict=True)
                ]
        return answers

    def keys(self, kind: PageKind, names: Sequence[str], own: Sequence[BlockKey]) -> list[BlockKey]:
        """Returns by which keys the pool has pages: previous ones of those that were found so, else their own."""
        usable = self._keys.under_previous()
        if not usable:
            return list(own)
        with self._lock:
            namers = [self._names.get((kind.namespaces, name)) for name in names]
        return [namer(name) if namer in usable else key for name, namer, key in zip(names, namers, own, strict=True)]

    def forget(self, kind: PageKind, names: Sequence[str]) -> None:
        """These pages have their own names now, or were not there. Unknown ones are ignored."""
        with self._lock:
            for name in names:
                self._names.pop((kind.namespaces, name), None)

    def _with_found(
        self, kind: PageKind, names: Sequence[str], there: Sequence[bool], namer: Namer, found: dict[str, bool]
    ) -> list[bool]:
        with self._lock:
            for name, is_found in found.items():
                if is_found:
                    self._names[kind.namespaces, name] = namer
                    self._names.move_to_end((kind.namespaces, name))
            while len(self._names) > _MOST_NAMES:
                self._names.popitem(last=False)
        return [is_there or found.get(name, False) for name, is_there in zip(names, there, strict=True)]


def _keys_by(namer: Namer, names: Sequence[str]) -> list[BlockKey]:
    return [namer(name) for name in names]
