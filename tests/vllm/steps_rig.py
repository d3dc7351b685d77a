"""Steps as vLLM's scheduler plans them, without an engine: what `DeviceBlocks` goes by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from request_rig import SIZE
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from kvtier_vllm.compat import BoundaryState
from kvtier_vllm.kv.device_blocks import DeviceBlocks
from kvtier_vllm.kv.groups import KVGroups
from kvtier_vllm.steps.step_plan import HandedOut

Tables = tuple[list[int], ...]


@dataclass
class Planner:
    """vLLM's side of a device: says which blocks its requests have, and plans steps in the order of its calls.

    A step is `begin`, and `end` when its results are there; under asynchronous scheduling, others begin between them.
    """

    groups: KVGroups
    known: set[str] = field(default_factory=set)
    """Requests whose KV is kept."""
    tables: dict[str, Tables] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = DeviceBlocks(self.groups, SIZE)
        self.handed_out = HandedOut(SIZE)
        self.number = 0
        """The number of the latest step that computes something."""
        kv: Any = self
        self.device.bind(kv)

    def get_block_ids(self, request_id: str) -> Tables:
        return self.tables[request_id]

    def get_blocks(self, request_id: str) -> SimpleNamespace:
        tables = [[SimpleNamespace(block_id=block) for block in table] for table in self.tables[request_id]]
        return SimpleNamespace(blocks=tables)

    def load(self, request_id: str, *tables: list[int], num_local: int = 0) -> None:
        """A request is given these device blocks, behind those that vLLM has found, for a load by somebody."""
        self.tables[request_id] = tables
        self.handed_out.note_hit(request_id, num_local)
        self.handed_out.note_allocation(request_id, tables)

    def begin(
        self,
        *,
        new: Mapping[str, tuple[int, int]] | None = None,
        running: Mapping[str, tuple[int, int]] | None = None,
        resumed: Mapping[str, tuple[int, int]] | None = None,
        fresh: Mapping[str, Tables] | None = None,
        finished: Sequence[str] = (),
        cleared: Sequence[int] = (),
        loads_within: bool = False,
        states: Mapping[str, list[BoundaryState]] | None = None,
        with_media: Sequence[str] = (),
        with_adapter: Sequence[str] = (),
    ) -> set[int]:
        """Plans a step; returns the device blocks that were handed out.

        :param new: requests that are admitted: tokens that they have, and that they have after the step. So are others.
        :param fresh: device blocks that running ones get in addition.
        :param with_media: those of the new requests that have an image, say; `with_adapter`: that have an adapter.
        :param loads_within: another connector loads what some of them have, within the step.
        """
        fresh, cached = fresh or {}, {**(running or {}), **(resumed or {})}
        for request_id, tables in fresh.items():
            for table, more in zip(self.tables[request_id], tables, strict=True):
                table += more
        spans = {**(new or {}), **cached}
        scheduled = {request_id: stop - start for request_id, (start, stop) in spans.items()}
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [
            self._new(request_id, start, ["an image"] if request_id in with_media else [], request_id in with_adapter)
            for request_id, (start, _) in (new or {}).items()
        ]
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=list(cached),
            resumed_req_ids=set(resumed or ()),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[self.tables[r] if r in (resumed or ()) else fresh.get(r) for r in cached],
            num_computed_tokens=[start for start, _ in cached.values()],
            num_output_tokens=[0 for _ in cached],
        )
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = scheduled, sum(scheduled.values())
        output.finished_req_ids, output.has_sync_kv_loads = set(finished), loads_within
        output.new_block_ids_to_zero = list(cleared) or None
        taken = self.handed_out.take(output)
        self.number += bool(scheduled)
        self.device.begin_step(output, taken, self.known, states or {}, self.number if scheduled else 0)
        return taken

    def end(self, *invalid: int) -> None:
        """The oldest step has its results.

        :param invalid: device blocks that loads have not filled.
        """
        self.device.note_invalid(invalid)
        self.device.end_step()

    def step(self, *invalid: int, **how: Any) -> None:
        """`begin` and `end`."""
        self.begin(**how)
        self.end(*invalid)

    def seen(self) -> set[int]:
        return {block for block in range(self.groups.num_blocks) if self.device.is_seen(block)}

    def awaited(self) -> set[int]:
        return {block for block in range(self.groups.num_blocks) if self.device.is_awaited(block)}

    def _new(self, request_id: str, num_computed: int, mm_features: Any, has_adapter: bool) -> NewRequestData:
        return NewRequestData(
            req_id=request_id,
            prompt_token_ids=[],
            mm_features=mm_features,
            sampling_params=None,
            pooling_params=None,
            block_ids=self.tables[request_id],
            num_computed_tokens=num_computed,
            lora_request=LoRARequest("any", 1, "anywhere") if has_adapter else None,
        )
