"""What computing a block of tokens takes here, by the steps that compute prompts."""

from collections import deque

from vllm.v1.core.sched.output import SchedulerOutput

from kvtier.clock import MONOTONIC, Clock

_MAX_UNDER_WAY = 8
"""Steps planned ahead of their results; vLLM has two."""


class StepTimes:
    """Scheduler thread only. Each step begins and ends once, in order."""

    def __init__(self, tokens_per_block: int, clock: Clock = MONOTONIC) -> None:
        self._size, self._clock = tokens_per_block, clock
        self._under_way: deque[tuple[float, float]] = deque(maxlen=_MAX_UNDER_WAY)
        """When it began, and how many blocks' worth of tokens it computes; 0 for one that decodes, above all."""
        self._ended_s = 0.0

    def begin(self, output: SchedulerOutput) -> None:
        """A step was planned."""
        scheduled = output.num_scheduled_tokens.values()
        num_prompt_tokens = sum(num_tokens for num_tokens in scheduled if num_tokens >= self._size)
        is_prefill = 2 * num_prompt_tokens > output.total_num_scheduled_tokens
        self._under_way.append((self._clock(), num_prompt_tokens / self._size if is_prefill else 0.0))

    def end(self) -> tuple[float, float]:
        """The oldest step has its results: its blocks, and the seconds it took, without those of the one before it."""
        if not self._under_way:
            return 0.0, 0.0
        begun_s, num_blocks = self._under_way.popleft()
        now = self._clock()
        seconds, self._ended_s = now - max(begun_s, self._ended_s), now
        return num_blocks, seconds
