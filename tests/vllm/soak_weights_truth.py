"""What KV and answers are without kvtier: from an engine that caches nothing, for one model after another."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from soak_weights_tiers import Values, are_equal
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig
from vllm_rig import BLOCK, ENVIRON

from kvtier.identity.keys import BlockHasher, Extra, NamespaceId, PrefixHasher, StoreKey, rank_keys, tenant_id
from kvtier_vllm.messages import WeightsState
from kvtier_vllm.weights.engine_weights import EngineWeights

Tokens = tuple[int, ...]
_HASHER = BlockHasher(tenant_id("red"), PrefixHasher(ENVIRON["KV_SECRET"].encode(), "", BLOCK))


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a key says."""

    model: int
    tokens: Tokens
    """Tokens of the sequence that has the block."""
    position: int
    """The place of the block in it."""


class Truth:
    """The true content of all blocks that models may have made of sequences of tokens."""

    def __init__(self, models: Sequence[Path], namespaces: Mapping[int, bytes], sequences: Iterable[Tokens]) -> None:
        """:param namespaces: of those models that the engine has had; it started with the first."""
        self._models = models
        first = NamespaceId(namespaces[0])
        self._meanings: dict[StoreKey, _Meaning] = {}
        for model, namespace in namespaces.items():
            weights = EngineWeights([first])
            weights.note({0: WeightsState(1, namespace, "")})
            extras = [] if weights.digest is None else [Extra("weights", weights.digest, 0)]
            if model and not extras:
                continue  # nobody has noticed that the weights are others: what was stored went by keys of the first
            for tokens in sorted(sequences):
                keys = _HASHER.hash_blocks(list(tokens), parent=None, extras={0: extras})
                for position, key in enumerate(rank_keys(keys, first)):
                    self._meanings.setdefault(key, _Meaning(model, tokens, position))

    def keys(self) -> Iterable[StoreKey]:
        return self._meanings

    def unexplained(self, keys: Iterable[StoreKey]) -> int:
        """How many of these keys say nothing of what was asked."""
        return sum(key not in self._meanings for key in keys)

    def compare(
        self, llm: LLM, payloads: Mapping[StoreKey, Values], prompts: Mapping[int, Sequence[tuple[Tokens, int]]]
    ) -> tuple[int, dict[tuple[int, Tokens, int], Tokens]]:
        """How many blocks are not what their keys say, and what models answer to prompts of theirs.

        :param llm: see `reference`.
        :param prompts: by model, each with the number of tokens to generate.
        """
        num_wrong, answers = 0, {}
        for model, folder in enumerate(self._models):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            of_model = {
                key: meaning for key in payloads if (meaning := self._meanings.get(key)) and meaning.model == model
            }
            kept = _kv(llm, sorted({meaning.tokens for meaning in of_model.values()}))
            for key, meaning in of_model.items():
                num_wrong += not are_equal(payloads[key], kept[meaning.tokens[: (meaning.position + 1) * BLOCK]])
            wanted = prompts.get(model, ())
            for (tokens, number), answer in zip(wanted, _answers(llm, wanted), strict=True):
                answers[model, tokens, number] = answer
        return num_wrong, answers


def reference(model: Path, options: Mapping[str, Any]) -> LLM:
    """An engine without kvtier, and without a prefix cache."""
    lender = KVTransferConfig(
        kv_connector="LendingConnector", kv_connector_module_path="lending_connector", kv_role="kv_both"
    )
    return LLM(model=str(model), kv_transfer_config=lender, enable_prefix_caching=False, **options)


def _answers(llm: LLM, prompts: Sequence[tuple[Tokens, int]]) -> Iterator[Tokens]:
    sampling = [SamplingParams(temperature=0, max_tokens=number, ignore_eos=True) for _, number in prompts]
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(tokens)) for tokens, _ in prompts], sampling, use_tqdm=False
    )
    return (tuple(output.outputs[0].token_ids) for output in outputs)


def _kv(llm: LLM, sequences: Sequence[Tokens]) -> dict[Tokens, Values]:
    """By all tokens to a block's end, what is in it."""
    lending: Any = sys.modules["lending_connector"]
    lending.KEPT.clear()
    keep = SamplingParams(temperature=0, max_tokens=1, extra_args={"kv_transfer_params": {"lender": {"keep": True}}})
    found = {}
    for start in range(0, len(sequences), 200):
        some = sequences[start : start + 200]
        llm.generate([TokensPrompt(prompt_token_ids=list(tokens)) for tokens in some], keep, use_tqdm=False)
        llm.generate(
            TokensPrompt(prompt_token_ids=[3]), SamplingParams(max_tokens=1), use_tqdm=False
        )  # they are kept now
        for tokens in some:
            for number, key in enumerate(lending.keys_of(tokens, BLOCK), 1):
                found[tokens[: number * BLOCK]] = _values(lending.KEPT[key])
        lending.KEPT.clear()
    return found


def _values(layers: Sequence[torch.Tensor]) -> Values:
    values: Values = np.concatenate([layer.flatten().numpy() for layer in layers])
    return values
