"""How a request becomes several: branches that part at its first token, and beams that fork at any."""

from kvtier_engine.scheduling.answers import Answers
from kvtier_engine.scheduling.prefix_cache import PrefixCache
from kvtier_engine.scheduling.request import Request, Stage
from kvtier_engine.scheduling.staged_requests import StagedRequests


class Branching:
    """Forks requests, with references to the blocks so far. Scheduler thread only."""

    def __init__(self, requests: StagedRequests, cache: PrefixCache, answers: Answers) -> None:
        self._requests, self._cache, self._answers = requests, cache, answers

    def fork(self, request: Request) -> list[Request]:
        """The branches that part here, if there are any."""
        forked = [request.fork(request.branch + 1 + index) for index in range(request.num_unforked)]
        request.num_unforked = 0
        for branch in forked:
            self._cache.fork(request, branch)
        if forked:
            self._requests.join_running(*forked)
        return forked

    def advance(self, request: Request) -> None:
        """One token more for all beams of the search of which `request` is one; some go on in several ways."""
        search, beams = request.search, self._beams(request.request_id)
        assert search is not None
        self._answers.note_first_token(request)
        continuations = search.advance({beam.branch: beam.tokens[beam.num_prompt_tokens :] for beam in beams.values()})
        going_on = {continuation.parent for continuation in continuations}
        for beam in beams.values():
            beam.num_unforked = 0
            if beam.branch not in going_on:
                self._requests.withdraw(beam)
                beam.stage = Stage.ENDED
        for parent, branch, token_id in continuations:
            if branch != parent:
                self._fork_beam(beams[parent], branch).tokens.append(token_id)
        for parent, branch, token_id in continuations:
            if branch == parent:
                beams[parent].tokens.append(token_id)
        if not continuations:
            self._answers.conclude(request, request.found())

    def _fork_beam(self, parent: Request, branch: int) -> Request:
        """A beam that lost its blocks while others were computed has none to share: what it forks begins anew, too."""
        forked = parent.fork(branch)
        if parent.stage is Stage.RUNNING and parent.num_to_compute == 0:
            self._cache.fork(parent, forked)
            self._requests.join_running(forked)
        else:
            self._requests.wait_first(forked)
        return forked

    def _beams(self, request_id: int) -> dict[int, Request]:
        return {r.branch: r for r in self._requests if r.request_id == request_id and r.stage is not Stage.ENDED}
