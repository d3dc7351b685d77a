"""One request on its way through the engine."""

import enum
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from kvtier.identity.keys import BlockHasher, BlockKey, PreviousHasher, group_key
from kvtier.offload import BlockStatus, PreviousKeys
from kvtier.system.logs import current_request_id
from kvtier_engine.scheduling.beam_search import BeamSearch
from kvtier_engine.scheduling.completion import Completion, DoneCallback, FinishReason, Logprobs, TokenCallback
from kvtier_engine.scheduling.request_spans import RequestSpans
from kvtier_engine.scheduling.sampling_params import Constraint, Sampling

NO_BLOCK = -1
"""Stands in a table for a block that the sequence does not hold."""
_GROUP_LABEL = b"kvtier.engine.group.v1"


class Stage(enum.Enum):
    WAITING = enum.auto()
    """Has no blocks. Its lookup may be under way."""
    LOADING = enum.auto()
    """Has all blocks of its tokens; some are being fetched into."""
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True)
class Lookup:
    """What the tiers below the device said of the blocks from `first_block` on."""

    first_block: int
    asked_at: float
    ticket: int | None
    """None when there is nothing to wait for."""
    statuses: list[BlockStatus] = field(default_factory=list)
    """The status of each block of the full group."""
    windows: "Lookup | None" = None
    """What was asked of the windowed groups afterwards: a status for each of them of each block, block by block."""
    found: list[str] = field(default_factory=list)
    """The tiers of the blocks that are not on the device, in the longest prefix that can be had."""
    num_wanted: int = 0
    """How many of these are worth fetching."""


@dataclass(slots=True)
class SiblingLookup:
    """What the tiers below the device said of a block of which the first tokens are wanted."""

    key: BlockKey
    ticket: int | None
    """None when there is nothing to wait for."""
    is_worth_fetching: bool = False


@dataclass(slots=True, eq=False)
class Unfinished:
    """What the branches of a request have in common while some go on. Scheduler thread only."""

    num_branches: int
    """The number of branches that have not ended."""
    num_answer_tokens: int = 0
    """Tokens of those that have."""


@dataclass(slots=True, eq=False)
class Request:
    """Tokens, blocks and progress of one branch of a request. Scheduler thread only, once it is submitted.

    A request begins as its first branch, which computes the prompt; the others are forked from it then.

    Tokens are in three runs: `[0, num_computed)` have KV in the blocks, the rest has not, and the
    blocks of `[0, num_published * tokens_per_block)` are known under their keys.
    """

    request_id: int
    tokens: list[int]
    """Prompt, then answer."""
    sampling: Sampling
    hasher: BlockHasher | None
    """The hasher of the request's tenant. None: this request neither uses nor feeds the cache."""
    on_done: DoneCallback
    arrived_at: float
    """The arrival time, on the scheduler's clock."""
    on_token: TokenCallback | None = None
    """None when nobody reads along: then tokens cost nothing before the end."""
    spans: RequestSpans | None = None
    """None: the request is not traced."""
    log_id: str = field(default_factory=current_request_id)
    """The request's id as lines of the log have it, from the thread that submits the request."""
    adapter: str | None = None
    """The LoRA adapter that it is computed with, which `hasher` knows by its digest. None: none."""
    branch: int = 0
    num_prompt_tokens: int = 0
    stage: Stage = Stage.WAITING
    keys: list[BlockKey] = field(default_factory=list)
    """Keys of the leading full blocks: at first the prompt's, later also the answer's."""
    block_ids: list[int] = field(default_factory=list)
    """Device blocks of all layers, or of those with full attention where windowed ones have blocks of their own."""
    windowed: list[list[int]] = field(default_factory=list)
    """Device blocks of each windowed group, with `NO_BLOCK` where the sequence holds none."""
    num_computed: int = 0
    num_published: int = 0
    """The number of leading blocks that are known under their keys."""
    lookup: Lookup | None = None
    sibling_lookup: SiblingLookup | None = None
    pending_since: float | None = None
    """When a lookup first ended in a block that is being written."""
    job_id: int | None = None
    """The load under way."""
    refused_at: int | None = None
    """How many blocks were free when they were too few."""
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    begins_anew: bool = False
    """A load has failed which windowed layers need as a whole: the request begins once more, and fetches nothing."""
    counted: bool = False
    """`cached_by_tier` is final: what a later start finds are tokens computed for this very request."""
    ttft_s: float | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    generator: torch.Generator = field(init=False)
    constraint: Constraint | None = field(init=False, default=None)
    failure: str | None = None
    """Why this branch cannot go on, which ends it; empty where the request is not to blame. None: it can."""
    num_unforked: int = 0
    """How many branches are still to be forked from this one."""
    _group_keys: dict[int, list[BlockKey]] = field(init=False, default_factory=dict)
    """What `group_keys` has made, by position."""
    unfinished: Unfinished = field(init=False)
    search: BeamSearch | None = field(init=False, default=None)
    """The search that this branch is a beam of."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.num_unforked = self.sampling.num_branches - 1
        self.unfinished = Unfinished(self.sampling.num_branches)
        self.generator = self.sampling.draws(0)
        if self.sampling.constraint is not None:
            self.constraint = self.sampling.constraint.copy()
        if self.sampling.beams is not None:
            ends = self.sampling.eos_token_ids
            self.search = BeamSearch(self.sampling.beams, self.sampling.max_tokens, ends)

    def fork(self, branch: int) -> "Request":
        """Returns a new branch with the tokens of this one, and draws of its own. It has no blocks yet."""
        forked = Request(
            request_id=self.request_id,
            tokens=list(self.tokens),
            sampling=self.sampling,
            hasher=self.hasher,
            on_done=self.on_done,
            arrived_at=self.arrived_at,
            on_token=self.on_token,
            spans=self.spans,
            log_id=self.log_id,
            adapter=self.adapter,
            branch=branch,
            stage=self.stage,
            keys=list(self.keys),
            cached_by_tier=self.cached_by_tier,
            counted=True,
            ttft_s=self.ttft_s,
            logprobs=list(self.logprobs),
        )
        forked.num_prompt_tokens, forked.num_unforked = self.num_prompt_tokens, 0
        forked.unfinished, forked.search = self.unfinished, self.search
        forked.generator = self.sampling.draws(branch)
        forked.constraint = None if self.constraint is None else self.constraint.copy()
        return forked

    @property
    def order(self) -> tuple[int, int]:
        """Sorts by arrival, and then the branches of a request."""
        return self.request_id, self.branch

    @property
    def num_places(self) -> int:
        """How many sequences it takes part in a step as, or will when it is forked."""
        return 1 + self.num_unforked

    @property
    def num_to_compute(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_answer_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def hash_blocks(self, num_blocks: int, tokens_per_block: int) -> None:
        """Extends `keys` to at least `num_blocks`, which must be full."""
        if self.hasher is None or len(self.keys) >= num_blocks:
            return
        start = len(self.keys)
        fresh: npt.NDArray[np.int32] = np.array(
            self.tokens[start * tokens_per_block : num_blocks * tokens_per_block], dtype=np.int32
        )
        self.keys += self.hasher.hash_blocks(fresh, parent=self.keys[-1] if start else None)

    @property
    def held_blocks(self) -> list[int]:
        """All device blocks that it has references to, in chain order within each KV group."""
        return [*self.block_ids, *(block for table in self.windowed for block in table if block != NO_BLOCK)]

    def group_keys(self, position: int, num_windowed: int) -> list[BlockKey]:
        """What the KV groups call a block of which there is a key: the full group by that key, and others by their own.

        :param num_windowed: how many others there are: always the same number.
        """
        if position not in self._group_keys:
            self._group_keys[position] = keys_of_groups(self.keys[position], num_windowed)
        return self._group_keys[position]

    def forget_keys(self) -> None:
        """Nothing that it computes from now on is known by a key."""
        self.hasher = None
        self.keys.clear()
        self._group_keys.clear()

    def previous_keys(self, span: range, tokens_per_block: int, groups: range) -> list[PreviousKeys]:
        """What previous secrets of the tenant make of these groups' keys at these positions. Hashes nothing yet."""
        if self.hasher is None or not self.hasher.previous:
            return []
        tokens: npt.NDArray[np.int32] = np.array(self.tokens[: span.stop * tokens_per_block], dtype=np.int32)
        return [_previous_keys(each, tokens, span.start, groups) for each in self.hasher.previous]

    def count_cached(self, tier: str, num_tokens: int) -> None:
        """Counts prompt tokens that were not computed, since this tier had them; only before `counted`."""
        if not self.counted:
            self.cached_by_tier[tier] = self.cached_by_tier.get(tier, 0) + num_tokens

    def completions(self, reason: FinishReason) -> list[Completion]:
        """The end of this branch, and of those that were to be forked from it."""
        return [self._completion(reason, branch) for branch in range(self.branch, self.branch + self.num_places)]

    def found(self) -> list[Completion]:
        """What a search that is over has found, the best first."""
        assert self.search is not None
        ended = self._completion("length", 0)
        return [
            replace(
                ended,
                branch=rank,
                token_ids=hypothesis.token_ids,
                finish_reason="stop" if hypothesis.token_ids[-1] in self.sampling.eos_token_ids else "length",
            )
            for rank, hypothesis in enumerate(self.search.found)
        ]

    def _completion(self, reason: FinishReason, branch: int) -> Completion:
        return Completion(
            token_ids=tuple(self.tokens[self.num_prompt_tokens :]),
            finish_reason=reason,
            num_prompt_tokens=self.num_prompt_tokens,
            cached_by_tier=dict(self.cached_by_tier),
            ttft_s=self.ttft_s,
            branch=branch,
            logprobs=tuple(self.logprobs),
            failure=self.failure or "",
        )


def keys_of_groups(key: BlockKey, num_windowed: int) -> list[BlockKey]:
    """What the KV groups call the block with this key, the full one first."""
    return [key, *(group_key(key, _GROUP_LABEL, group) for group in range(1, num_windowed + 1))]


def _previous_keys(previous: PreviousHasher, tokens: npt.NDArray[np.int32], start: int, groups: range) -> PreviousKeys:
    """:param start: the position of the lookup's first block."""
    keys: list[BlockKey] = []
    size = previous.hasher.tokens_per_block

    def first(num_keys: int) -> list[BlockKey]:
        stop = start + num_keys // len(groups)
        fresh = tokens[len(keys) * size : stop * size]
        keys.extend(previous.hasher.hash_blocks(fresh, parent=keys[-1] if keys else None))
        return [keys_of_groups(key, groups.stop - 1)[group] for key in keys[start:stop] for group in groups]

    return PreviousKeys(previous, first, keys_per_block=len(groups))
