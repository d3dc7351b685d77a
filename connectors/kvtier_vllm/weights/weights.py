"""Which weights a worker computes with: they may change while vLLM runs, and then its namespace says nothing."""

import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.identity.weights_digest import file_identities, tensors_outline
from kvtier_vllm.messages import WeightsState

_log = logging.getLogger(__name__)


class Change(enum.Enum):
    """What becomes of the weights."""

    NONE = enum.auto()
    """They stay as they are, and KV on the device is lost or is of something else."""
    FROM_FILES = enum.auto()
    """The weights are all read from the model's folder."""
    UNKNOWN = enum.auto()


class Weights:
    """Counts the changes of one worker's weights and says which namespace it has after each.

    Any thread may change weights, and any may read `state`, which is replaced as a whole and takes no lock.
    """

    def __init__(self, namespace: Callable[[], bytes], files: Callable[[str], Sequence[Path]]) -> None:
        """
        :param namespace: the worker's, from what lies in the model's folder at this moment.
        :param files: those that weights are read from when the model is loaded from this path. Raises `ConfigError`.
        """
        self._namespace, self._files = namespace, files
        self._lock = threading.Lock()
        self._under_way: list[Change] = []
        """Changes that have begun and not ended, each within the one before. Guarded by _lock."""
        self._is_spoiled = False
        """Something within the outermost change has changed weights in another way. Guarded by _lock."""
        self.state = WeightsState(0, namespace(), "")
        self._outline = tensors_outline(files(""))
        """The outline of the weights that vLLM has started with, which it requires to be complete."""

    @contextlib.contextmanager
    def changing(self, what: str, change: Change, path: str = "") -> Iterator[None]:
        """Surrounds a change of weights. Nothing is known of them meanwhile; afterwards, what `change` says, if all
        went well. Two generations begin: what is under way when the change begins belongs to neither.

        Two generations begin: what is under way when the change begins belongs to neither.

        :param path: that weights are read from; empty: from the model's.
        """
        with self._lock:
            self._under_way.append(change)
            is_outermost, before = len(self._under_way) == 1, self.state
            # Files are loaded by functions that can also be called alone, with weights from anywhere.
            self._is_spoiled |= self._under_way[0] is Change.NONE and change is not Change.NONE
            if is_outermost:
                self._begin_generation(None, f"{what} is under way")
        after: bytes | None = None
        why = f"{what} failed"
        try:
            files = self._identities(path) if is_outermost and change is Change.FROM_FILES else None
            yield
            if is_outermost:
                after, why = self._after(what, change, before, files, path)
        finally:
            with self._lock:
                self._under_way.pop()
                if is_outermost:
                    if self._is_spoiled:
                        after, why, self._is_spoiled = None, what, False
                    self._begin_generation(after, why)

    def forget_device(self, why: str) -> None:
        """What is on the device may be of something else than its keys say. The weights are the same."""
        with self.changing(why, Change.NONE):
            pass

    def _begin_generation(self, namespace: bytes | None, why: str) -> None:
        """Caller holds _lock."""
        self.state = WeightsState(self.state.generation + 1, namespace, "" if namespace is not None else why)

    def _after(
        self, what: str, change: Change, before: WeightsState, files: object, path: str
    ) -> tuple[bytes | None, str]:
        """The namespace, or why there is none."""
        if change is Change.NONE:
            return before.namespace, before.why
        if change is Change.UNKNOWN:
            return None, what
        try:
            if tensors_outline(self._files(path)) != self._outline:
                return None, f"{what} read other tensors than there were at the start"
            namespace = self._namespace()
            if files is None or self._identities(path) != files:
                return None, f"files have changed while {what} read them"
        except Exception as error:  # the weights are loaded: that must not seem to have failed
            _log.warning("kvtier cannot tell which weights were loaded", exc_info=not isinstance(error, ConfigError))
            return None, f"{what}: {error}"
        return namespace, ""

    def _identities(self, path: str) -> object:
        """None: there are no such files."""
        try:
            return file_identities(self._files(path))
        except (ConfigError, OSError):
            return None
