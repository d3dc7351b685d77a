"""What a mover has to tell its directory, until somebody asks for it."""

import threading
from collections.abc import Callable

from kvtier.offload.inventory import InventoryLog
from kvtier.offload.messages import Inventory, ToDirectory


class Answers:
    """Answers to batches, and changes of the tiers' contents. Any thread; nothing blocks but `wait`.

    `_lock` guards all fields. It is held while the inventory is drained: a change that an answer implies is then never
    polled after that answer.
    """

    def __init__(self, inventory: InventoryLog, forget_untold: Callable[[str], None]) -> None:
        """
        :param forget_untold: has the tier of this name drop what its inventory has not been told of; must not block.
        """
        self._inventory, self._forget_untold = inventory, forget_untold
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._outbox: list[ToDirectory] = []
        self._changes: list[Inventory] = []
        """Taken from the inventory for the next poll."""
        self._nudged = False
        self._closed = False

    def post(self, message: ToDirectory) -> None:
        """Keeps a message for the next `poll`, and ends `wait`."""
        with self._ready:
            self._outbox.append(message)
            self._ready.notify_all()

    def poll(self) -> list[ToDirectory]:
        """Takes all messages since the last poll."""
        with self._lock:
            out, self._outbox = self._outbox, []
            changes, self._changes = [*self._changes, *self._inventory.drain()], []
        # Before the answers: a block that is reported stored is then known to be where it is.
        return [*changes, *out]

    def unheard(self, tier: str) -> list[bytes]:
        """Returns the keys of what the tier holds and the directory cannot have heard of yet."""
        with self._lock:
            self._forget_untold(tier)
            changes = self._inventory.drain()
            self._changes += changes
        return [key for change in changes if change.tier == tier for key in change.added]

    def wait(self, timeout_s: float) -> None:
        """Blocks until there is an answer to a batch, or until `nudge` or `close`, at most `timeout_s`."""
        with self._ready:
            self._ready.wait_for(lambda: bool(self._outbox) or self._nudged or self._closed, timeout_s)
            self._nudged = False

    def nudge(self) -> None:
        """Ends the present `wait`, or else the next one."""
        with self._ready:
            self._nudged = True
            self._ready.notify_all()

    def close(self) -> None:
        """Ends every `wait`, now and later. Answers can still be posted and polled."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
