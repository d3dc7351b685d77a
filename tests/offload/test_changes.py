"""What the directory notes of blocks that come and go. The hierarchy's state machine checks it on all its ways, too."""

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given

from hierarchy_rig import BLOCK_BYTES, NAMESPACE, TENANT, Held, Rig, chain, until
from kvtier.identity.keys import rank_keys
from kvtier.offload import ContentChanges, InventoryLog
from kvtier.offload.index import BlockIndex
from kvtier.offload.messages import HOST, Inventory
from kvtier.testing.blocks import summed
from kvtier.tiers.host.tier import HostTier

DISK = "disk"
KEYS = chain(12)
NUM_SLOTS = 8


def noted(changes: ContentChanges) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for tier, key in changes.take():
        found.setdefault(tier, []).append(key)
    return found


class Watched:
    """A rig with a tier of its own, watched from the beginning."""

    def __init__(self) -> None:
        inventory = InventoryLog([TENANT], NAMESPACE)
        self.disk = Held(HostTier(2**22, slab_bytes=2**16, name=DISK, on_event=inventory.on_event))
        self.rig = Rig(local=self.disk, inventory=inventory, num_slots=NUM_SLOTS)
        self.directory = self.rig.hierarchy._directory
        self.changes = self.directory.watch()

    def has(self, tier: str) -> list[bool]:
        return [self.directory.has(tier, key) for key in KEYS]

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self.rig.close()
        self.disk.close()


def test_what_is_there_before_anybody_watches_is_not_noted() -> None:
    rig = Rig()
    directory = rig.hierarchy._directory
    rig.save(KEYS, range(12))
    assert directory._index.content_changes is None
    changes = directory.watch()
    assert not changes
    assert directory.watch() is changes
    rig.close()


def test_a_block_comes_to_each_tier_and_leaves_one() -> None:
    with Watched() as it:
        assert it.changes.tiers == (HOST, DISK)
        for start in (0, 4):
            it.rig.save(KEYS[start : start + 4], range(4))
            it.rig.settle()
            assert it.has(HOST) == it.has(DISK) == [number < start + 4 for number in range(12)]
            assert noted(it.changes) == {HOST: KEYS[start : start + 4], DISK: KEYS[start : start + 4]}
        it.rig.save(KEYS[8:], range(4))
        it.rig.settle()
        assert it.has(DISK) == [True] * 12
        gone = [key for key, is_there in zip(KEYS, it.has(HOST), strict=True) if not is_there]
        assert len(gone) == 4
        changes = noted(it.changes)
        assert sorted(changes[HOST]) == sorted([*gone, *KEYS[8:]])
        assert changes[DISK] == KEYS[8:]
        assert not it.changes


def test_a_block_is_noted_when_it_can_be_read_not_when_it_is_expected() -> None:
    with Watched() as it:
        it.disk.inner.write([summed(rank_keys(KEYS[:1], NAMESPACE)[0], bytes(BLOCK_BYTES))])
        it.rig.hierarchy.poll()
        assert noted(it.changes) == {DISK: [KEYS[0]]}
        it.disk.gate.clear()
        job = it.rig.hierarchy.start_load([(KEYS[0], 0), (KEYS[1], 1)])
        until(lambda: it.disk.entered.is_set() or None)
        it.rig.hierarchy.poll()
        assert it.directory.holds(KEYS[0])
        assert not it.directory.has(HOST, KEYS[0])
        assert not it.changes
        it.disk.gate.set()
        assert it.rig.result(job).failed == {1}
        assert noted(it.changes) == {HOST: [KEYS[0]]}


def test_a_reset_takes_everything_also_what_is_on_its_way() -> None:
    with Watched() as it:
        it.rig.save(KEYS[:3], range(3))
        it.rig.settle()
        noted(it.changes)
        it.disk.gate.clear()
        job = it.rig.hierarchy.start_save([(KEYS[3], 3)])
        it.rig.hierarchy.reset()
        assert it.has(HOST) == it.has(DISK) == [False] * 12
        changes = noted(it.changes)
        assert sorted(changes[HOST]) == sorted(changes[DISK]) == sorted(KEYS[:3])
        it.disk.gate.set()
        assert job is not None
        it.rig.result(job)
        it.rig.settle()
        assert it.has(HOST) == it.has(DISK) == [False] * 12


@st.composite
def ranks_news(draw: st.DrawFn) -> list[tuple[int, Inventory] | str]:
    some = st.lists(st.sampled_from(KEYS), unique=True)

    def inventory(rank: int, cleared: bool, added: Sequence[bytes], others: Sequence[bytes]) -> tuple[int, Inventory]:
        return rank, Inventory(DISK, cleared, list(added), [key for key in others if key not in added])

    news = st.builds(inventory, st.integers(0, 1), st.booleans(), some, some)
    return draw(st.lists(news | st.sampled_from(["begin", "end"]), max_size=30))


@given(ranks_news())
def test_of_several_ranks_a_tier_has_what_all_have_and_nothing_while_it_is_emptied(
    news: list[tuple[int, Inventory] | str],
) -> None:
    index = BlockIndex(1, 2, [DISK], lambda key: None)
    index.content_changes = ContentChanges([HOST, DISK])
    mirrors: list[set[bytes]] = [set(), set()]
    told: set[bytes] = set()
    num_forgetting = 0
    for item in news:
        if isinstance(item, tuple):
            rank, changes = item
            index.apply(rank, changes)
            kept = set() if changes.cleared else mirrors[rank]
            mirrors[rank] = (kept | set(changes.added)) - set(changes.removed)
        elif item == "begin":
            index.begin_forgetting(DISK)
            num_forgetting += 1
        elif num_forgetting:
            index.end_forgetting(DISK)
            num_forgetting -= 1
        for _, key in index.content_changes.take():
            told = told | {key} if index.has(DISK, key) else told - {key}
        assert told == (set() if num_forgetting else mirrors[0] & mirrors[1])
