"""What vLLM's scheduler has planned for a step: which tokens it computes, and which device blocks were handed out."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput


class ComputedSpan(NamedTuple):
    """Tokens of a request that a step computes, drafted ones included."""

    request_id: str
    start: int
    stop: int
    tables: Sequence[Sequence[int]] | None
    """The device blocks of the request, by KV group, if vLLM admits it with this step, anew or again."""


def computed_spans(output: SchedulerOutput) -> Iterator[ComputedSpan]:
    """The span of each request of this step."""
    for new in output.scheduled_new_reqs:
        stop = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
        yield ComputedSpan(new.req_id, new.num_computed_tokens, stop, new.block_ids)
    cached = output.scheduled_cached_reqs
    for request_id, fresh, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        tables = fresh if request_id in cached.resumed_req_ids else None
        yield ComputedSpan(request_id, start, start + output.num_scheduled_tokens[request_id], tables)


def written_blocks(output: SchedulerOutput, tokens_per_block: int) -> set[int]:
    """Device blocks that were allocated for this step, and those that it clears.

    The latter may be nobody's: vLLM also clears what it gave to a request that it preempted before the step began.
    """
    written = set(output.new_block_ids_to_zero or ())
    for new in output.scheduled_new_reqs:
        for table in new.block_ids:
            written.update(table[new.num_computed_tokens // tokens_per_block :])
    cached = output.scheduled_cached_reqs
    for request_id, fresh, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if fresh is not None:
            start = num_computed // tokens_per_block if request_id in cached.resumed_req_ids else 0
            for table in fresh:
                written.update(table[start:])
    return written


class HandedOut:
    """Device blocks that vLLM gives to requests between one step and the next. Scheduler thread only.

    A request that waits for a load is in no step, and another connector's load is announced to nobody else. Its blocks
    are known from its allocation alone.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._size = tokens_per_block
        self._num_local: dict[str, int] = {}
        """The tokens of each request whose KV vLLM has found on the device, for an allocation before the next step."""
        self._blocks: set[int] = set()
        """Device blocks that were allocated since the last step."""

    def note_hit(self, request_id: str, num_tokens: int) -> None:
        """vLLM has found KV of so many tokens on the device, for a request that waits."""
        self._num_local[request_id] = num_tokens

    def note_allocation(self, request_id: str, tables: Sequence[Sequence[int]]) -> None:
        """A request that waits was given device blocks; these are all that it has, by KV group."""
        num_local = self._num_local.pop(request_id, None)
        if num_local is None:
            return  # its load is over: it is in the step that follows, which says what is new
        for table in tables:
            self._blocks.update(table[num_local // self._size :])

    def take(self, output: SchedulerOutput) -> set[int]:
        """The device blocks that were handed out since the last call, now that the step after that is planned."""
        blocks, self._blocks = self._blocks, set()
        self._num_local.clear()
        return blocks | written_blocks(output, self._size)
