"""Which of vLLM's device blocks hold KV that kvtier may save: KV that this engine computed before kvtier's eyes.

The model is not the only writer of a device block. Another child of vLLM's MultiConnector may load into it, at a time
that a connector beside it is not told, and such a load may fail and leave garbage. Weights may change after a block was
computed. So a block counts as foreign from the moment that vLLM hands it out, and as seen only once the model has
computed all of its tokens since, or once a load of kvtier's own has filled it.

KV is also wrong when the KV before it was. Each block is therefore sound or not: a block is sound from the moment that
it is handed out, until vLLM hears that a load has not filled it or the weights change. What a request computes on top
of a block that is not sound is not seen, and is not sound either; what it computes with an adapter that is not known to
be the one that vLLM's own cache calls its blocks by is not sound.
"""

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput

from kvtier_vllm.compat import BoundaryState
from kvtier_vllm.kv.groups import NULL_BLOCK, KVGroups
from kvtier_vllm.steps.step_plan import ComputedSpan, computed_spans

_NONE: set[int] = set()


@dataclass(slots=True)
class _Run:
    """Tokens of a request that were computed one after the other since vLLM gave it device blocks."""

    start: int
    stop: int
    is_named: bool
    """Whether vLLM's name of a block that it fills tells all that the block depends on."""
    is_misnamed: bool
    """Whether that name may be another adapter's. It stays so if the request is preempted and admitted again."""
    is_tainted: bool = False
    """Whether what it computes is not sound."""


@dataclass(frozen=True, slots=True)
class _Computed:
    """Device blocks of one request that are full with one step."""

    run: _Run
    start: int
    """The index of the run's first token among those that the step computes."""
    whole: Sequence[int]
    """Blocks that lie in the run as a whole."""
    partly: Sequence[int] = ()
    """Blocks whose first tokens the request was given."""
    prefix: Sequence[int] | None = None
    """Every block before the run, where the run begins with this step."""


@dataclass(slots=True)
class _Step:
    """A step without results. Some count only when these are there."""

    number: int
    """The number by which workers name it; 0 if it computes nothing."""
    handed_out: set[int]
    computed: list[_Computed]
    """The runs by `start`: vLLM gives a request also what others compute in the same step, and all of that begins
    before what the request computes itself."""
    is_in_doubt: bool
    """Whether another connector loads within this step: its results say which blocks that has not filled."""
    filled: set[int] = field(default_factory=set)
    """Blocks that kvtier's own loads have filled since."""
    awaited: set[int] = field(default_factory=set)
    """Blocks that are seen if the results are good, and may be seen if they are not."""
    has_counted: bool = False


class DeviceBlocks:
    """Keeps what is known of each device block. Scheduler thread only; nothing blocks.

    A step costs as much as it has requests and full blocks, whatever the size of the device. Under asynchronous
    scheduling steps begin before earlier ones have ended; they end in the order in which they began.
    """

    def __init__(self, groups: KVGroups, tokens_per_block: int) -> None:
        self._groups, self._size = groups, tokens_per_block
        self._kv: KVCacheManager | None = None
        self._seen: set[int] = set()
        self._sound: set[int] = {NULL_BLOCK}
        self._runs: dict[str, _Run] = {}
        """The runs of requests that have computed something and have not ended, by request id."""
        self._steps: deque[_Step] = deque()
        """Steps without results, in their order."""
        self._with_media: set[str] = set()
        """Ids of requests whose KV is not kept, and whose blocks may be named after media that nobody has looked at."""
        self._with_adapter: set[str] = set()
        """Ids of requests with an adapter."""
        self._invalid: set[int] = set()
        """Device blocks of `note_invalid`, of the step that ends next."""
        self.epoch = 0
        """The number of calls of `forget_all`."""

    def bind(self, kv: KVCacheManager) -> None:
        """Nothing that is computed is seen until it is known which device blocks requests have."""
        self._kv = kv

    def is_seen(self, block: int) -> bool:
        """Whether the block is full of KV that kvtier may save."""
        return block in self._seen

    def is_awaited(self, block: int) -> bool:
        """Whether the block may be seen as soon as a step that is under way has its results."""
        return any(not step.has_counted and block in step.awaited for step in self._steps)

    def begin_step(
        self,
        output: SchedulerOutput,
        handed_out: set[int],
        known: Container[str],
        states: Mapping[str, Iterable[BoundaryState]],
        number: int = 0,
    ) -> None:
        """A step was planned.

        Blocks that requests compute whose KV is not kept are seen, too: vLLM gives them to later requests by the same
        tokens and salt, and these may keep them. Not so those with media or adapters that nobody has looked at.

        :param handed_out: device blocks that vLLM has allocated since the last step, for requests in this step or not,
            and those that this step clears.
        :param known: ids of requests whose KV is kept.
        :param states: of KV groups without KV of each token, those that are on the device after this step.
        :param number: by which the workers name the step.
        """
        self._seen -= handed_out
        for earlier in self._steps:  # whose loads have filled blocks that are somebody else's now
            earlier.filled -= handed_out
            earlier.awaited -= handed_out
        for request_id in output.finished_req_ids:
            self._runs.pop(request_id, None)
            self._with_media.discard(request_id)
            self._with_adapter.discard(request_id)
        for new in output.scheduled_new_reqs:
            if new.mm_features and new.req_id not in known:
                self._with_media.add(new.req_id)
            if new.lora_request is not None:
                self._with_adapter.add(new.req_id)
        computed = [each for span in computed_spans(output) if (each := self._computed(span, known)) is not None]
        computed += [
            _Computed(run, state.num_tokens - 1, [state.device_block])
            for request_id, of_request in states.items()
            if (run := self._runs.get(request_id)) is not None
            for state in of_request
            if run.start < state.num_tokens <= run.stop
        ]
        computed.sort(key=lambda of_request: of_request.start)
        step = _Step(number, handed_out, computed, output.has_sync_kv_loads)
        if step.is_in_doubt or self._last_awaited is not None:
            runs = (of_request for of_request in computed if of_request.run.is_named)
            step.awaited.update(*(of_request.whole for of_request in runs if not of_request.run.is_misnamed))
        else:
            self._count(step)
        self._steps.append(step)

    def note_invalid(self, blocks: Iterable[int]) -> None:
        """The step that ends next has results which say that loads of any connector have not filled these blocks."""
        self._invalid.update(blocks)

    def end_step(self) -> None:
        """The oldest step has its results."""
        invalid, self._invalid = self._invalid, set()
        step = self._steps.popleft() if self._steps else None
        if step is None or step.has_counted:
            self._spoil(invalid)
            return
        self._count(step, invalid)
        for later in self._steps:
            if later.has_counted or later.is_in_doubt:
                break
            self._count(later)

    def fill(self, blocks: Iterable[int], epoch: int) -> None:
        """A load of kvtier's own has filled these, and verified what it brought.

        :param epoch: as it was when that load began: KV from before `forget_all` does not count.
        """
        if epoch != self.epoch:
            return
        if (step := self._last_awaited) is not None:
            step.filled.update(blocks)
            step.awaited.update(step.filled)
        else:
            self._seen.update(blocks)

    def forget_all(self, since: int = 0, known: Container[str] = ()) -> None:
        """The weights, or whatever else KV depends on, have changed: nothing that is on the device counts any more.

        Neither does what its requests go on to compute, nor what others compute on top of these blocks. A request that
        vLLM preempts and admits again counts from there on, if it hits none of them.

        :param since: the first step that is known to have run after the change. What requests that began with it or
            later have computed counts, as far as they hit nothing from before. 0: no step is known to.
        :param known: ids of requests whose KV is kept nevertheless: their adapters are what they were.
        """
        self.epoch += 1
        self._seen.clear()
        self._sound = {NULL_BLOCK}
        for request_id, run in self._runs.items():
            run.is_tainted = True
            run.is_misnamed |= request_id in self._with_adapter and request_id not in known
        for step in self._steps:
            step.filled.clear()
            is_after = 0 < since <= step.number
            if is_after and step.has_counted:
                self._count(step)
            elif not is_after:
                step.has_counted = True
                step.awaited.clear()

    @property
    def _last_awaited(self) -> _Step | None:
        """The latest step, if it does not count yet. Then whatever follows has to wait for it."""
        return self._steps[-1] if self._steps and not self._steps[-1].has_counted else None

    def _computed(self, span: ComputedSpan, known: Container[str]) -> _Computed | None:
        """None for a request that goes on and fills no block: most of them, in most steps."""
        request_id, start, stop, tables = span
        run, prefix, size = self._runs.get(request_id), None, self._size
        # vLLM goes back behind the start of a run only when a load before it has failed.
        if tables is not None or run is None or not run.start < start <= run.stop:
            is_misnamed = run is not None and run.is_misnamed
            is_misnamed |= request_id in self._with_adapter and request_id not in known
            run = self._runs[request_id] = _Run(start, stop, request_id not in self._with_media, is_misnamed)
            prefix = [block for table in self._tables(span) for block in table[: -(-start // size)]]
        elif start // size == stop // size:
            run.stop = stop
            return None
        run.stop = stop
        positions = range(start // size, stop // size)
        num_partly = int(bool(positions) and positions.start * size < run.start)
        blocks = self._at(request_id, positions[num_partly:])
        return _Computed(run, start, blocks, self._at(request_id, positions[:num_partly]), prefix)

    def _tables(self, span: ComputedSpan) -> Sequence[Sequence[int]]:
        if span.tables is not None:
            return span.tables
        if self._kv is None:
            return ()
        tables: Sequence[Sequence[int]] = self._kv.get_block_ids(span.request_id)
        return tables

    def _at(self, request_id: str, positions: range) -> list[int]:
        """The request's device blocks there, of all groups with KV of each token."""
        if not positions or self._kv is None:
            return []
        tables = self._kv.get_blocks(request_id).blocks
        found = [
            tables[group][position].block_id
            for group in self._groups.of_tokens
            for position in positions
            if position < len(tables[group])
        ]
        return [block for block in found if block != NULL_BLOCK]

    def _count(self, step: _Step, invalid: set[int] = _NONE) -> None:
        step.has_counted = True
        self._seen -= step.handed_out
        self._sound |= step.handed_out
        self._spoil(invalid)
        for computed in step.computed:
            run = computed.run
            if computed.prefix is not None:
                run.is_tainted = run.is_misnamed or not self._sound.issuperset(computed.prefix)
            if run.is_tainted:
                self._spoil(computed.whole)
                self._spoil(computed.partly)
                continue
            self._sound.update(computed.whole)
            if run.is_named:
                self._seen.update(computed.whole)
        self._seen.update(step.filled)

    def _spoil(self, blocks: Iterable[int]) -> None:
        self._seen.difference_update(blocks)
        self._sound.difference_update(blocks)
