"""What vLLM's scheduler has planned for a step: how far requests are computed, which device blocks are written to."""

from collections.abc import Iterator

from vllm.v1.core.sched.output import SchedulerOutput


def computed_tokens(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """Requests of this step, and how many of their tokens are computed after it, drafted ones included."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, num_computed + output.num_scheduled_tokens[request_id]


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
