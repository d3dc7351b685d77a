"""A steady tenant of a pool, and neighbours that take turns: one that floods this pool or another, and burners."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from statistics import fmean

from kvtier.clock import MONOTONIC
from kvtier.errors import KvtierError
from kvtier.identity.keys import tenant_id
from kvtier.net.address import Address
from kvtier.protocol.block import Verb
from kvtier.testing.blocks import make_key, summed
from kvtier.tiers.base import Status, WriteStatus
from kvtier.tiers.pool.connection import PoolConnection
from kvtier_bench.measuring.rounds import percentile, process_clock
from kvtier_bench.processes.burner_process import BurnerProcess
from kvtier_bench.processes.family import await_rest
from kvtier_bench.processes.flood_means import BLOCK_BYTES
from kvtier_bench.processes.flood_process import FloodProcess
from kvtier_bench.processes.pool_process import SHM, PoolProcess
from kvtier_bench.processes.steady_process import Steady, SteadyProcess, SteadyWork
from kvtier_bench.processes.vitals import Vitals

BLUE, RED, GREEN = "blue", "red", "green"
_PROMPT_BLOCKS = 4
_COLD_PART = 3
"""How many times as many blocks red reads in turn as memory keeps for it."""
_NUM_POOL_BURNERS = 2
"""Burners that stand for the pool's own work: it may keep more than one core busy."""
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Flooding:
    """How red floods."""

    memory_bytes: int
    """The pool's."""
    means: Sequence[str]
    num_processes: int
    """Red's; the means are divided among them."""
    pause_s: float
    """The time between two reads of a client of blue's."""

    @property
    def blue_bytes(self) -> int:
        """What blue is owed of memory."""
        return self.memory_bytes // 2

    @property
    def red_bytes(self) -> int:
        """What red is owed of memory."""
        return self.memory_bytes // 4

    @property
    def working_set_bytes(self) -> int:
        """The payloads of all blocks that blue reads: three quarters of what it is owed."""
        return self.blue_bytes * 3 // 4

    def tenants(self) -> dict[str, list[str]]:
        """Lines of the tenants' tables. Green comes when all is over."""
        disk_bytes = {BLUE: 4 * self.memory_bytes // 3, RED: self.memory_bytes}
        return {
            name: [
                f"memory = {{ guaranteed_bytes = {owed} }}",
                f"disk = {{ guaranteed_bytes = {disk_bytes.get(name, 0)} }}",
                f"redis = {{ cap_bytes = {self.memory_bytes // 2} }}",
            ]
            for name, owed in ((BLUE, self.blue_bytes), (RED, self.red_bytes), (GREEN, 0))
        }


@dataclass(slots=True)
class Beside:
    """What blue had beside one kind of neighbour. One thread."""

    of_path: dict[str, list[Steady]] = field(default_factory=dict)
    cpu_shares: list[float] = field(default_factory=list)
    """Processor seconds per second of the neighbours and the pool, round by round."""

    def hit_rate(self, path: str) -> float:
        return fmean(steady.hit_rate for steady in self.of_path[path])

    def percentiles_s(self, path: str, percent: float) -> list[float]:
        """A percentile of blue's reads, round by round."""
        return [percentile(steady.reads_s, percent) for steady in self.of_path[path]]

    def reads_s(self, path: str) -> list[float]:
        return [seconds for steady in self.of_path[path] for seconds in steady.reads_s]

    def num_refused(self) -> int:
        return sum(steady.num_refused for rounds in self.of_path.values() for steady in rounds)


@dataclass(frozen=True, slots=True)
class Aftermath:
    """The pool when all floods are over, beside what it was after the first. Its sockets are those that lead to no
    Redis."""

    before: Vitals
    after: Vitals
    num_red_connections: tuple[int, int]
    """How many connections red could have at a time, before and after."""
    served: Mapping[str, bool]
    """Whether a new connection of each tenant has stored a block, found it and read it."""


class FloodRig:
    """The tenants' processes. One thread."""

    def __init__(
        self, pools: Mapping[str, PoolProcess], redis_pid: int | None, how: Flooding, stack: ExitStack
    ) -> None:
        """Returns with blue's working set in place.

        :param pools: the pool of each tenant: of one process, or blue's and red's of one each.
        :param redis_pid: the Redis of red's pool, which has no other client; None: there is none.
        :param stack: ends all processes.
        """
        self.how, self._pools, self._redis_pid = how, pools, redis_pid
        self._pids = sorted({pool.pid for pool in pools.values()})
        self._clocks = [process_clock(pid) for pid in self._pids]
        paths = [SHM if pools[BLUE].shared_memory else "unix", "tcp"]
        num_prompts = max(1, how.working_set_bytes // len(paths) // (_PROMPT_BLOCKS * BLOCK_BYTES))
        work = SteadyWork(num_prompts, _PROMPT_BLOCKS, BLOCK_BYTES, how.pause_s)
        self.blue = {path: SteadyProcess(pools[BLUE], path, work, stack) for path in paths}
        num, num_cold = how.num_processes, max(1, _COLD_PART * how.red_bytes // BLOCK_BYTES)
        self._red = [FloodProcess(pools[RED], f"red-{i}", how.means[i::num], num_cold, stack) for i in range(num)]
        self._burners = [BurnerProcess(stack) for _ in range(num + _NUM_POOL_BURNERS)]
        self._blue_connection = stack.enter_context(closing(dial(pools[BLUE])))
        self.beside_red, self.beside_burners = Beside(), Beside()
        self.blue_bytes: list[int] = []
        """What blue has of memory at the end of each of red's rounds."""
        self.done: Counter[str] = Counter()
        """What red did in all its rounds."""
        self._warm_up()
        self._num_red_connections = num_connections(pools[RED])
        self._before = self._vitals()
        """The pool after one flood: it keeps threads for gRPC. See `measure_quiet`."""
        self._quiet_share = 0.0
        """Processor seconds per second of the pool when only blue calls it."""
        self._burn_shares: list[float] = []
        """What each burner takes: what red's processes and the pool took in red's last round."""

    def measure_quiet(self, seconds: float) -> None:
        """A round of blue alone, and one of red's to learn what burners have to take. Neither counts."""
        began_s = self._pool_clock()
        self._warm_up()
        for process in self.blue.values():
            process.start(seconds)
        for process in self.blue.values():
            process.result()
        self._quiet_share = (self._pool_clock() - began_s) / seconds
        self.measure_red(seconds)
        self.beside_red, self.done = Beside(), Counter()
        self.blue_bytes.clear()
        self._before = self._vitals()

    def measure_burners(self, seconds: float) -> None:
        """A round beside burners, after one of red's."""
        began_s = self._begin()
        for burner, share in zip(self._burners, self._burn_shares, strict=True):
            burner.start(seconds, share)
        self._run_blue(self.beside_burners, seconds)
        cpu_s = sum(burner.result() for burner in self._burners)
        self.beside_burners.cpu_shares.append((cpu_s + self._pool_clock() - began_s) / seconds)

    def measure_red(self, seconds: float) -> None:
        """A round beside the flood."""
        began_s = self._begin()
        for process in self._red:
            process.start(seconds)
        self._run_blue(self.beside_red, seconds)
        pool_cpu_s = self._pool_clock() - began_s
        self.blue_bytes.append(self._blue_memory_bytes())
        results = [process.result() for process in self._red]
        for _, counts in results:
            self.done.update(counts)
        pool_share = max(0.0, pool_cpu_s / seconds - self._quiet_share) / _NUM_POOL_BURNERS
        self._burn_shares = [cpu_s / seconds for cpu_s, _ in results] + [pool_share] * _NUM_POOL_BURNERS
        self.beside_red.cpu_shares.append((sum(cpu_s for cpu_s, _ in results) + pool_cpu_s) / seconds)

    def aftermath(self) -> Aftermath:
        """Waits until the pool is at rest and has closed red's connections, ten seconds at the most."""
        await_rest(self._pids)
        deadline = MONOTONIC() + _PATIENCE_S
        after = self._vitals()
        while (after.num_sockets or 0) > (self._before.num_sockets or 0) and MONOTONIC() < deadline:
            await_rest(self._pids)
            after = self._vitals()
        num_red = num_connections(self._pools[RED])
        served = {name: is_served(pool) for name, pool in self._pools.items()}
        return Aftermath(self._before, after, (self._num_red_connections, num_red), served)

    def _begin(self) -> float:
        """The pool's clock when it has done what the last round left, and blue has its working set again."""
        await_rest(self._pids)
        self._warm_up()
        await_rest(self._pids)
        return self._pool_clock()

    def _warm_up(self) -> None:
        for process in self.blue.values():
            process.start(0)
        for process in self.blue.values():
            process.result()

    def _run_blue(self, beside: Beside, seconds: float) -> None:
        for process in self.blue.values():
            process.start(seconds)
        for path, process in self.blue.items():
            beside.of_path.setdefault(path, []).append(process.result())

    def _blue_memory_bytes(self) -> int:
        answer = self._blue_connection.ask(Verb.USAGE, {}, (), MONOTONIC() + _PATIENCE_S)
        return next(tier.number("used_bytes") for tier in answer.maps("tiers") if tier.text("name") == "memory")

    def _pool_clock(self) -> float:
        """Processor seconds of all pools."""
        return sum(clock() for clock in self._clocks)

    def _vitals(self) -> Vitals:
        """What red's pool takes when all are at rest. Its connections to the Redis, which stay, are not counted: the
        Redis has a socket for each."""
        await_rest(self._pids)
        vitals = Vitals.of(self._pools[RED].pid)
        if self._redis_pid is None or vitals.num_sockets is None:
            return vitals
        return replace(vitals, num_sockets=vitals.num_sockets - (Vitals.of(self._redis_pid).num_sockets or 0))


def dial(pool: PoolProcess) -> PoolConnection:
    """A connection of the pool's tenant. Raises as `PoolConnection.open` does."""
    return PoolConnection.open(Address.parse(pool.tcp), pool.token, tenant_id(pool.tenant), MONOTONIC() + _PATIENCE_S)


def num_connections(pool: PoolProcess) -> int:
    """How many connections the pool gives its tenant at a time."""
    with ExitStack() as stack, suppress(KvtierError, OSError):
        for num in range(1 << 20):
            opened = num
            stack.enter_context(closing(dial(pool)))
    return opened


def is_served(pool: PoolProcess) -> bool:
    """Whether a new client of the tenant stores a block, and reads it."""
    item = summed(make_key("after the flood", tenant=tenant_id(pool.tenant)), bytes(range(256)))
    with ExitStack() as stack:
        tier = pool.tier("tcp", stack)
        kept = tier.write([item]) in ([WriteStatus.STORED], [WriteStatus.EXISTS])
        into = memoryview(bytearray(len(item[1])))
        return kept and tier.read([item[0]], [into]) == [Status.HIT] and into == item[1]
