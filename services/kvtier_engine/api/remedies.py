"""What an operator can do about requests that are refused: in the engine's log, since clients cannot do it."""

import logging

log = logging.getLogger(__name__)


class Remedies:
    """Logs each remedy once. Event loop only."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, remedy: str) -> None:
        """Logs the remedy the first time.

        :param remedy: one of few texts: nothing in it comes from a request.
        """
        if remedy not in self._told:
            self._told.add(remedy)
            log.warning("requests are refused that this engine could answer: %s", remedy)
