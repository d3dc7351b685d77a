"""What the directory has for the movers: messages in order, and the ids that their answers bear."""

from kvtier.offload.messages import ToMover


class MessageQueue:
    """Whatever is sent goes to the movers of all ranks, and each answers for itself. Scheduler thread only."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = frozenset(range(num_ranks))
        self._messages: list[ToMover] = []
        """Sent since the last `take`."""
        self._last_id = 0

    def __bool__(self) -> bool:
        return bool(self._messages)

    def new_id(self) -> int:
        """Returns an id for a batch, a job or a ticket: no two have the same."""
        self._last_id += 1
        return self._last_id

    def send(self, message: ToMover) -> None:
        self._messages.append(message)

    def take(self) -> list[ToMover]:
        """Removes and returns what every mover has to be given, in order."""
        messages, self._messages = self._messages, []
        return messages
