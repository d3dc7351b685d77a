"""How long an engine's thread is inside of calls of the cache, step by step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from kvtier.clock import MONOTONIC


class TimedCalls:
    """What calls of one class took, summed up from one step to the next. One thread."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        """The seconds inside of calls, of each step since `clear`."""
        self._step_s = 0.0
        self._is_inside = False

    def clear(self) -> None:
        """Forgets what was."""
        self.steps_s, self._step_s = [], 0.0

    def end_step(self) -> None:
        """What was called until now was the former step's."""
        if self._step_s:
            self.steps_s.append(self._step_s)
            self._step_s = 0.0

    @contextmanager
    def of(self, kind: type, names: Sequence[str], first: str) -> Iterator[None]:
        """Times these methods of all objects of a class, inside of the context.

        :param first: the one of them with which a step begins.
        """
        before = {name: getattr(kind, name) for name in names}
        for name, method in before.items():
            setattr(kind, name, self._timed(method, begins_step=name == first))
        try:
            yield
        finally:
            for name, method in before.items():
                setattr(kind, name, method)

    def _timed(self, method: Callable[..., Any], *, begins_step: bool) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._is_inside:  # one that calls another
                return method(*arguments, **options)
            if begins_step:
                self.end_step()
            self._is_inside = True
            began_s = MONOTONIC()
            try:
                return method(*arguments, **options)
            finally:
                self._step_s += MONOTONIC() - began_s
                self._is_inside = False

        return timed
