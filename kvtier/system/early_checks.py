"""What a plug-in of an engine looks at before the engine starts may refuse the start, and may not break it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.errors import ConfigError


@contextmanager
def only_refusing(log: logging.Logger) -> Iterator[None]:
    """Lets nothing but a `ConfigError` out of the block, and that without a traceback: its text is for the user.

    Anything else, as an import of the engine's that is somewhere else by now, ends the block with one warning. The
    engine goes on as without the check: what is wrong is refused later, when the engine makes its part of kvtier.
    """
    try:
        yield
    except ConfigError as error:
        raise error.with_traceback(None) from None
    except Exception as error:
        log.warning("kvtier's check before the start was left out, the engine starts without it: %r", error)
