"""In place of a model: arithmetic over all tokens so far, kept in the paged KV. It notices KV that is not its own.

Like a model, it makes wrong KV and wrong tokens of wrong KV, if it is told to go on then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

NUM_LAYERS = 2
_PRIME = (1 << 61) - 1


def states(tokens: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """What "attention" makes of each position: depends on every token up to it.

    :param known: the first ones, which are not computed again.
    """
    made = list(known)
    for position in range(len(made), len(tokens)):
        before = made[-1] if made else 1
        made.append((before * 1_000_003 + tokens[position] + 17) % _PRIME)
    return made


def next_token(state: int) -> int:
    return state % 1000 + 3


def answer_to(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What has to come of a prompt, whatever was loaded, lost or computed twice."""
    tokens = list(prompt)
    made: list[int] = []
    for _ in range(num_tokens):
        made = states(tokens, made)
        tokens.append(next_token(made[-1]))
    return tokens[len(prompt) :]


@dataclass
class _Running:
    tokens: list[int]
    blocks: list[int]
    num_computed: int
    num_prompt: int
    states: list[int] = field(default_factory=list)


class ArithmeticModel:
    """Model and model runner of one rank. Its KV differs from that of other ranks."""

    def __init__(self, *, rank: int, num_blocks: int, block_size: int) -> None:
        self.is_strict = True
        """Whether KV of other tokens is an error."""
        self._size = block_size
        self.layers = {
            f"layer.{number}": torch.full((num_blocks, block_size), -1, dtype=torch.int64)
            for number in range(NUM_LAYERS)
        }
        self._signs = [1 + rank * NUM_LAYERS + number for number in range(NUM_LAYERS)]
        self._running: dict[str, _Running] = {}

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step. Raises AssertionError when a request would attend to KV that is not that of its tokens."""
        self._take_in(output)
        sampled = {request_id: self._compute(request_id, n) for request_id, n in output.num_scheduled_tokens.items()}
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=KVConnectorOutput(),
        )

    def _take_in(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_req_ids:
            self._running.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._running[new.req_id] = _Running(
                list(new.prompt_token_ids),
                list(new.block_ids[0]),
                new.num_computed_tokens,
                len(new.prompt_token_ids),
            )
        cached = output.scheduled_cached_reqs
        for request_id, fresh, num_computed, num_answered in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            running = self._running[request_id]
            if request_id in cached.resumed_req_ids:
                running.blocks = list(fresh[0])
                running.tokens = list(cached.all_token_ids[request_id])
                running.states.clear()
            elif fresh is not None:
                running.blocks += fresh[0]
            running.num_computed = num_computed
            # What was sampled on top of a load that has failed is not taken.
            del running.tokens[running.num_prompt + num_answered :]
            del running.states[len(running.tokens) :]

    def _compute(self, request_id: str, num_tokens: int) -> list[int]:
        """Writes KV of so many tokens, and returns the next token if these are all."""
        running = self._running[request_id]
        end = running.num_computed + num_tokens
        assert end <= len(running.tokens), f"{request_id}: tokens are scheduled that do not exist"
        running.states = states(running.tokens[:end], running.states)
        expected = torch.tensor(running.states[:end])
        blocks = torch.tensor(running.blocks).repeat_interleave(self._size)[:end]
        offsets = torch.arange(end) % self._size
        old, new = slice(0, running.num_computed), slice(running.num_computed, end)
        is_wrong = False
        for layer, sign in zip(self.layers.values(), self._signs, strict=True):
            wrong = (layer[blocks[old], offsets[old]] != expected[old] ^ sign).nonzero().flatten().tolist()
            is_wrong |= bool(wrong)
            where = f"at positions {wrong[0]}..{wrong[-1]}" if wrong else ""
            assert not (is_wrong and self.is_strict), f"{request_id}: KV of other tokens {where}"
            layer[blocks[new], offsets[new]] = (expected[new] ^ sign) + int(is_wrong)
        if end < len(running.tokens):
            return []
        running.tokens.append(next_token(running.states[-1] + int(is_wrong)))
        return [running.tokens[-1]]
