"""How much of a prompt several pools have together."""

from collections.abc import Sequence

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult


def usable_prefix(
    present: Sequence[bool], side_pools: Sequence[tuple[PoolTransfer, Sequence[bool]]]
) -> PoolTransferResult:
    """The longest prefix that all pools can restore, all that can be restored, and where each pool's own ends.

    :param present: which pages of KV are there.
    :param side_pools: which pages of the other pools are there, and what each pool needs of a prefix.
    """
    num_pages = next((i for i, there in enumerate(present) if not there), len(present))
    restorable = set(range(1, num_pages + 1))
    ends: dict[str, int] = {PoolName.KV: num_pages} if num_pages else {}
    for transfer, there in side_pools:
        if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
            continue  # a second form of what is there anyway: it limits nothing, and without a verdict it is not used
        of_pool = _ends(transfer, there[:num_pages])
        if of_pool:
            ends[transfer.name] = max(of_pool)
        restorable &= of_pool
    ordered = sorted(restorable)
    return PoolTransferResult(ordered[-1] if ordered else 0, ends, ordered)


def _ends(transfer: PoolTransfer, there: Sequence[bool]) -> set[int]:
    """Returns after how many pages a pool can be restored: where all before are there, or all that a window still
    sees."""
    if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
        window = len(there)
    elif transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or ()))
    else:
        return set()
    ends, run = set(), 0
    for end, is_there in enumerate(there, 1):
        run = run + 1 if is_there else 0
        if run >= min(window, end):
            ends.add(end)
    return ends
