"""What is looked at in `make chaos` beside answers: caps, whose names are where, and whether all has healed."""

import contextlib
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import redis

from chaos_clients import Asker, History, Prompt, Tally
from chaos_faults import wait_until
from chaos_schedule import POOLS
from chaos_site import CAPS, DISK_BYTES, SECRETS, TOKENS, Member, Site
from kvtier.identity.keys import BlockKey, StoreKey, split_store_key, tenant_id
from kvtier.tiers.disk.operations.survey import survey

HEALED_S = 60.0
"""How long all may take to heal."""
_SAMPLE_S = 0.5
_ASK_S = 3.0
_SETTLE_S = 3.0


_NAME = re.compile(rb"kvt1:([0-9a-f]{32}):([0-9a-f]{32}):([0-9a-f]{64})")
"""The name of a block, or of a part of one. Books have other names."""

_READ_BLOCKS = re.compile(r'^kvtier_pool_read_blocks_total{[a-z_]+="([^"]+)"} (\S+)$', re.MULTILINE)


class Quotas:
    """Looks all the time at what tenants have of each tier, in a thread of its own."""

    def __init__(self, site: Site, tally: Tally) -> None:
        self._site, self._tally = site, tally
        self.most: dict[str, int] = {}
        """The most bytes that were seen, by place and tenant. The thread's until `stop`."""
        self.num_samples = 0
        self._reads: dict[tuple[str, int], dict[str, float]] = {}
        """The last seen counts of blocks that were read, by where they were, of each life of a pool. Likewise."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-quotas")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()

    def pool_reads(self) -> dict[str, int]:
        """Blocks that engines have read, by where their pool had them. After `stop`."""
        total: Counter[str] = Counter()
        for reads in self._reads.values():
            total.update({where: int(count) for where, count in reads.items()})
        return dict(total)

    def _run(self) -> None:
        while not self._ends.wait(_SAMPLE_S):
            for name in POOLS:
                with contextlib.suppress(httpx.HTTPError):
                    pool = self._site.members[name]
                    self._look(name, tenants_of(pool))
                    self._reads[name, pool.num_starts] = _reads_of(pool)
            with contextlib.suppress(redis.RedisError, ValueError):
                self._look_at_redis()

    def _look(self, pool: str, report: dict[str, Any]) -> None:
        self.num_samples += 1
        for tenant, figures in report["tenants"].items():
            for tier, share in figures["tiers"].items():
                self._compare(f"{pool} {tier}", tenant, share["used_bytes"], CAPS[tier][tenant])
        used = sum(
            figures["tiers"].get("disk", {"used_bytes": 0})["used_bytes"] for figures in report["tenants"].values()
        )
        self._compare(f"{pool} disk", "all", used, DISK_BYTES)

    def _look_at_redis(self) -> None:
        """What lies there, not what books say."""
        with self._site.redis.client() as client:
            names = [name for name in client.scan_iter("kvt1:*", count=1000) if _NAME.match(name)]
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.strlen(name)
            sizes = pipeline.execute() if names else []
        self.num_samples += 1
        for tenant in SECRETS:
            prefix = f"kvt1:{tenant_id(tenant).hex()}:".encode()
            used = sum(size for name, size in zip(names, sizes, strict=True) if name.startswith(prefix))
            self._compare("redis", tenant, used, CAPS["redis"][tenant])

    def _compare(self, place: str, tenant: str, used: int, cap: int) -> None:
        key = f"{place} {tenant}"
        self.most[key] = max(self.most.get(key, 0), used)
        if used > cap:
            with self._tally.lock:
                self._tally.counts["over_cap"] += 1
            self._tally.problem(f"{tenant} has {used} bytes in {place}, and its cap is {cap}")


def tenants_of(pool: Member) -> dict[str, Any]:
    """What an operator sees. Raises `httpx.HTTPError`."""
    headers = {"Authorization": f"Bearer {TOKENS['operator']}"}
    answer: dict[str, Any] = httpx.get(f"{pool.url}/tenants", headers=headers, timeout=_ASK_S).raise_for_status().json()
    return answer


def _reads_of(pool: Member) -> dict[str, float]:
    text = httpx.get(f"{pool.url}/metrics", timeout=_ASK_S).raise_for_status().text
    return {where: float(count) for where, count in _READ_BLOCKS.findall(text)}


def listed_tenants(pool: Member) -> dict[str, Any]:
    """What `kvtier tenants list --json` prints."""
    command = [sys.executable, "-m", "kvtier.cli.main", "tenants", "list", "--json", "--pid"]
    output = subprocess.run([*command, str(pool.service.process.pid)], check=True, capture_output=True).stdout
    report: dict[str, Any] = json.loads(output)
    return report


class Names:
    """Store keys that were found somewhere, held against those that each tenant can have."""

    def __init__(self, history: History, tally: Tally) -> None:
        self._of = {tenant: history.names(tenant) for tenant in SECRETS}
        self._tally = tally
        self.counts: Counter[str] = Counter()

    def look(self, place: str, keys: Sequence[StoreKey]) -> None:
        """A key under one tenant's id with the hash of another one is a problem; one that nobody knows was garbled on
        its way, as names in Redis may be, and is counted."""
        for key in keys:
            tenant, _, chain_hash = split_store_key(key)
            owners = {name for name, known in self._of.items() if BlockKey(tenant_id(name) + chain_hash) in known}
            if {tenant_id(name) for name in owners} == {tenant}:
                self.counts[f"{place}, own"] += 1
            elif owners:
                self.counts[f"{place}, foreign"] += 1
                self._tally.problem(f"a block of {owners} lies in {place} below tenant {tenant.hex()}")
            else:
                self.counts[f"{place}, garbled"] += 1

    def look_at_redis(self, site: Site) -> None:
        with site.redis.client() as client:
            names = [_NAME.match(name) for name in client.scan_iter("kvt1:*", count=1000)]
        self.look("redis", [StoreKey(bytes.fromhex(b"".join(name.groups()).decode())) for name in names if name])

    def look_at_disk(self, name: str, folder: Path) -> None:
        """Looks at the disk of a pool that has ended. Nothing there is to be corrupt: what was changed on its way is
        not written."""
        found = survey(folder, verify=True)
        self.look(f"disk of {name}", found.live)
        if not found.is_sound:
            self._tally.problem(f"the disk of {name} has {len(found.corrupt)} corrupt blocks, or damaged segments")


class Healing:
    """Whether everything works again when no fault is left."""

    def __init__(self, site: Site, askers: dict[str, Asker], history: History, tally: Tally) -> None:
        self._site, self._askers, self._history, self._tally = site, askers, history, tally

    def heals(self, fresh: Sequence[Prompt]) -> float:
        """Seconds that it took; what did not happen in time is a problem.

        :param fresh: prompts that nobody has asked. Red asks one at engine 1, and what engine 3 has of it is from pool
            B, which has it from Redis, where pool A has put it. Then blue asks it, to whom it is new.
        """
        began_s = time.monotonic()
        deadline_s = began_s + HEALED_S
        for name in POOLS:
            if not wait_until(deadline_s, lambda name=name: self._is_writable(name)):
                self._tally.problem(f"{name} is not writable again: see its log")
        left = itertools.cycle(fresh)
        for number, prompt in enumerate(left):
            if self._passes_on(prompt, is_new=number < len(fresh)):
                break
            if time.monotonic() > deadline_s:
                self._tally.problem("what engine 1 saves does not come to engine 3")
                break
        return time.monotonic() - began_s

    def _is_writable(self, name: str) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            tiers = tenants_of(self._site.members[name])["tiers"]
            return all(tier["state"] == "writable" for tier in tiers.values())
        return False

    def _passes_on(self, prompt: Prompt, *, is_new: bool) -> bool:
        self._askers["engine-1"].once(prompt, forgetting=True)
        keys = self._history.blocks("red", prompt)
        found = wait_until(time.monotonic() + _SETTLE_S, lambda: self._in_redis(keys))
        from_pool = self._askers["engine-3"].once(prompt, forgetting=True).hit_tokens.get("pool", 0)
        blue = self._askers["engine-2"]
        if is_new and sum(blue.once(prompt, forgetting=True).hit_tokens.values()):
            self._tally.problem("blue had what only red had asked")
        wait_until(time.monotonic() + _SETTLE_S, lambda: self._in_redis(self._history.blocks("blue", prompt)))
        again = blue.once(prompt, forgetting=True).hit_tokens.get("pool", 0)
        return found and is_new and from_pool > 0 and again > 0

    def _in_redis(self, keys: Sequence[BlockKey]) -> bool:
        with self._site.redis.client() as client:
            names = b"\n".join(client.scan_iter("kvt1:*", count=1000))
        return all(key[16:].hex().encode() in names for key in keys)


def told_every(seconds: float, tell: Callable[[str], None]) -> Callable[[Callable[[], str]], None]:
    """A function that tells what it is given a function for, unless it has done so within so many seconds."""
    last_s = -seconds

    def maybe(text: Callable[[], str]) -> None:
        nonlocal last_s
        if time.monotonic() >= last_s + seconds:
            last_s = time.monotonic()
            tell(text())

    return maybe
