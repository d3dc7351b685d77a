"""Looking up the host of an address."""

import time

import pytest

from kvtier.net.address import Address, open_connection
from threads_rig import no_more_threads


def test_a_name_that_no_thread_can_look_up_is_not_found() -> None:
    """What fails by an `OSError` is a miss."""
    with no_more_threads("kvtier-resolve"), pytest.raises(OSError, match="no thread to look pool"):
        open_connection(Address.parse("pool.invalid:7600"), time.monotonic() + 1)
