"""The contract of tiers over a pool, whichever way leads there."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.testing.contract import MakeTier, TierContract, tier_state_machine
from kvtier.tiers.base import Tier
from pool_rig import RED


class OverPool(TierContract):
    """Every tier that a test makes has a pool of its own; all are closed at the end."""

    tenants = (RED, RED)

    def opened(self, capacity_bytes: int, folder: Path) -> contextlib.AbstractContextManager[Tier]:
        """A pool that keeps so many bytes, and the tier of a client. The folder is empty, and there for sockets."""
        raise NotImplementedError

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Iterator[MakeTier]:
        with contextlib.ExitStack() as stack:

            def make(capacity_bytes: int) -> Tier:
                folder = tmp_path / str(len(list(tmp_path.iterdir())))
                folder.mkdir()
                return stack.enter_context(self.opened(capacity_bytes, folder))

            yield make


def run_states(connected: Callable[[], Tier]) -> None:
    """Runs the state machine of tiers over a pool that its examples share; `connected` makes a client of it."""
    machine = tier_state_machine(lambda _capacity_bytes: connected(), payload_bytes=128 * 1024, max_examples=20)
    machine.TestCase().runTest()
