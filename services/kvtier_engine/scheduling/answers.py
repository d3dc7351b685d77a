"""What requesters are told: the tokens of their answers, and the ends."""

import logging

from torch import Tensor

from kvtier.clock import Clock
from kvtier.errors import InvalidInputError
from kvtier_engine.scheduling.completion import Completion, FinishReason, NewToken
from kvtier_engine.scheduling.metrics import EngineMetrics
from kvtier_engine.scheduling.request import Request, Stage
from kvtier_engine.scheduling.sampling import logprobs_of, sample

log = logging.getLogger(__name__)


class Answers:
    """Adds to the answers of requests, and tells and counts it. Scheduler thread only."""

    def __init__(self, metrics: EngineMetrics, clock: Clock) -> None:
        self._metrics, self._clock = metrics, clock

    def sample(self, request: Request, logits: Tensor) -> None:
        """Draws the next token. Where that fails, `request.failure` says why, and no other request is concerned.

        :param logits: float32 `[vocab_size]`.
        """
        try:
            self._sample(request, logits)
        except InvalidInputError as error:
            request.failure = str(error)
        except Exception:
            request.failure = ""
            log.exception("no token could be drawn for a request")

    def _sample(self, request: Request, logits: Tensor) -> None:
        token_id, num_top, logprobs = sample(logits, request), request.sampling.num_top, None
        request.tokens.append(token_id)
        if request.constraint is not None:
            request.constraint.accept(token_id)
        if num_top is not None:
            logprobs = logprobs_of(logits, token_id, num_top)
            request.logprobs.append(logprobs)
        self.note_first_token(request)
        if request.on_token is not None:
            request.on_token(NewToken(token_id, request.branch, logprobs))

    def note_first_token(self, request: Request) -> None:
        """The request has a token; only the first one counts."""
        if request.ttft_s is None:
            request.ttft_s = self._clock() - request.arrived_at
            if request.spans is not None and request.branch == 0:
                request.spans.first_token()

    def end(self, request: Request, reason: FinishReason) -> None:
        """The request is over, unless it was already. Its blocks stay as they are."""
        if request.stage is not Stage.ENDED:
            request.stage = Stage.ENDED
            self.conclude(request, request.completions(reason))

    def conclude(self, request: Request, completions: list[Completion]) -> None:
        """These branches of the request are over."""
        unfinished = request.unfinished
        unfinished.num_branches -= len(completions)
        unfinished.num_answer_tokens += sum(len(completion.token_ids) for completion in completions)
        if not unfinished.num_branches:
            last, num_answer_tokens = completions[-1], unfinished.num_answer_tokens
            self._metrics.count(last, num_answer_tokens)
            if request.spans is not None:
                attributes = last.attributes() | {"answer_tokens": num_answer_tokens}
                request.spans.end(attributes, failed=last.finish_reason == "failed")
        for completion in completions:
            request.on_done(completion)
