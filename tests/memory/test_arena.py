"""Host memory that an engine's blocks wait in."""

import pytest

from kvtier.errors import ConfigError
from kvtier.memory.arena import Arena


@pytest.mark.parametrize("slot_bytes", [2**40, 2**60])
def test_more_host_memory_than_there_is(slot_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"host\.capacity_bytes"):
        Arena(1024, slot_bytes)
