"""The comparison of `kvtier bench invariant` on a small model: nothing differs, and what does is named."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from kvtier.errors import KvtierError
from kvtier.system.working_folder import working_folder
from kvtier_bench.cases.invariant import case_of, draw_prompts
from kvtier_bench.cases.invariant_conditions import PREEMPTIONS, chosen_families
from kvtier_bench.cases.invariant_serving import Comparison, WatchedModel
from kvtier_bench.gpu.measuring.models import random_weights
from kvtier_bench.processes.pool_process import PoolProcess, pool_process
from kvtier_engine.model.llama import Chunk
from kvtier_engine.model.paged_kv import PagedKV, kv_namespace
from tiny_model import CONFIG

SHAPE = replace(
    CONFIG, hidden_size=192, intermediate_size=208, num_attention_heads=3, num_key_value_heads=1, head_dim=64,
)  # fmt: skip
PROMPTS = draw_prompts(Random(2), SHAPE.vocab_size, num_prompts=12, longest=70)


@pytest.fixture(scope="module")
def pool() -> Iterator[tuple[PoolProcess, Path]]:
    with working_folder() as folder, pool_process(folder, 64 << 20) as process:
        yield process, folder


def comparison(
    pool: tuple[PoolProcess, Path], dtype: torch.dtype, kind: type[WatchedModel] = WatchedModel
) -> Comparison:
    torch.manual_seed(1)
    model = kind(SHAPE, random_weights(SHAPE, dtype, torch.device("cpu")), batch_invariant=True)
    namespace = kv_namespace(SHAPE, bytes(32), dtype)
    process, folder = pool
    disk = folder / str(dtype)
    return Comparison(model, namespace, PROMPTS, answer_tokens=9, pool=process, folder=disk)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_the_same_bits_wherever_a_prompt_comes_from(
    pool: tuple[PoolProcess, Path], dtype: torch.dtype
) -> None:
    outcomes = comparison(pool, dtype).run(chosen_families(None))
    assert len(outcomes) == 11
    for outcome in outcomes:
        assert (outcome.named, outcome.num_different_logits, outcome.num_different_tokens) == ([], 0, 0)
        assert outcome.num_logits == outcome.num_tokens == 9 * len(PROMPTS)
    counted = {name for outcome in outcomes for name, count in outcome.counts.items() if count}
    assert counted == {"device", "host", "pool", "disk", PREEMPTIONS}


class _Uneven(WatchedModel):
    """Depends on how a sequence was cut: behind a prefix, logits grow with the chunk."""

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], kv: PagedKV) -> torch.Tensor:
        logits = super().forward(chunks, kv)
        for row, chunk in zip(logits, chunks, strict=True):
            row += bool(chunk.start) * (len(chunk.token_ids) - 1) * 0.25
        return logits


def test_what_differs_is_named(pool: tuple[PoolProcess, Path]) -> None:
    reference, outcome = comparison(pool, torch.float32, _Uneven).run(chosen_families(["of 17 tokens"]))
    assert reference.num_different_logits == 0
    num_cut = sum(len(prompt) > 17 and len(prompt) % 17 != 1 for prompt in PROMPTS)
    assert outcome.num_different_logits == num_cut
    assert outcome.largest_difference == pytest.approx(16 * 0.25)
    assert outcome.named[0].startswith("in chunks of 17 tokens: prompt 0 of 70 tokens, token 0 of its answer: ")
    assert case_of(outcome, "float32").figures["num_different_logits"] == num_cut


def test_conditions_that_are_none_are_named() -> None:
    with pytest.raises(KvtierError, match="no condition with sleepy in its name: there are in chunks of 17"):
        chosen_families(["sleepy"])
