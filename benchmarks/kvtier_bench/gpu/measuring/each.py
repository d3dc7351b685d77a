"""The cases of a part, one after the other: what goes wrong in one takes no other with it."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping

from kvtier_bench.gpu.measuring.comparing import WrongResultError
from kvtier_bench.gpu.measuring.rows import failure, left_out
from kvtier_bench.gpu.measuring.setting import Setting
from kvtier_bench.measuring.report import Case


def each(setting: Setting, cases: Mapping[str, Callable[[], Iterable[Case]]]) -> Iterator[Case]:
    """The rows of every case, by its name. One for which there is no time is left out.

    A case that raises is a failed check, and the next one has its turn. Where more was wrong than a result, the
    traceback goes to standard error. Raises what the device says when its context is broken, in which nothing else can
    be measured.
    """
    for name, rows in cases.items():
        if setting.left_s() < 0:
            yield left_out(name)
            continue
        try:
            yield from rows()
        except WrongResultError as error:
            yield failure("results", name, str(error))
        except Exception as error:
            traceback.print_exc()
            yield failure("results", name, f"{type(error).__name__}: {error}")
            setting.synchronize()
