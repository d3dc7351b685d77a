"""Which weights an engine computes with, as the scheduler hears it from the workers."""

import hashlib
import logging
from collections.abc import Mapping, Sequence

from kvtier_vllm.messages import WeightsState

_log = logging.getLogger(__name__)
_LABEL = b"kvtier.vllm.weights.v1"


class EngineWeights:
    """The state of the weights on all ranks. Scheduler thread only."""

    def __init__(self, namespaces: Sequence[bytes]) -> None:
        """:param namespaces: of the weights that vLLM has started with, in rank order."""
        self._first = list(namespaces)
        self._states = [WeightsState(0, namespace, "") for namespace in namespaces]

    @property
    def generations(self) -> list[int]:
        """The generation of each rank's weights, as far as was heard."""
        return [state.generation for state in self._states]

    @property
    def are_known(self) -> bool:
        """Whether KV can be told by them. If not, none is kept, and none may be used."""
        return all(state.namespace is not None for state in self._states)

    @property
    def digest(self) -> bytes | None:
        """The digest of all ranks' namespaces: keys depend on it beside the namespaces that the engine started with.

        None: they are the same. The namespaces of movers and directory stay what they were: an engine that has loaded
        other weights in place is not known to compute the same as one that starts with these.
        """
        namespaces = [state.namespace or b"" for state in self._states]
        return None if namespaces == self._first else hashlib.sha256(_LABEL + b"".join(namespaces)).digest()

    def note(self, states: Mapping[int, WeightsState]) -> None:
        """Workers have said what became of their weights, by rank."""
        were_known, before = self.are_known, self.digest
        for rank, state in states.items():
            self._states[rank] = state
        if were_known and not self.are_known:
            _log.error(
                "kvtier reads and keeps nothing any more: nobody can tell which weights vLLM computes with (%s). Load "
                "them from safetensors files by `reload_weights`, or start vLLM anew",
                next(state.why for state in self._states if state.namespace is None),
            )
        elif self.are_known and (not were_known or self.digest != before):
            told = "those of the start" if self.digest is None else self.digest.hex()[:32]
            _log.info("kvtier keeps KV of the weights that were loaded last: %s", told)
