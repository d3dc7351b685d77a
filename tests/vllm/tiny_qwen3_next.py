"""A Qwen3-Next of random parameters: it says nothing, but the same to the same prompt.

Three of its four layers are gated delta nets, whose states are a convolution's last inputs and sums over all tokens.
"""

from pathlib import Path

import torch
from tiny_llama import HEAD_DIM, HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, SPREAD, VOCABULARY, write_tokenizer
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

NUM_STATE_GROUPS = 3
"""vLLM makes KV groups of as many layers as there are of the rarest kind."""
BLOCK = 96
"""Tokens: the least that vLLM makes blocks of here, so that a state fits into one."""
_LAYERS = [*["linear_attention"] * NUM_STATE_GROUPS, "full_attention"]
_LINEAR_HEAD_DIM = 64
"""vLLM's kernels for the CPU want as much."""


def make(folder: Path) -> None:
    """Writes configuration, weights and tokenizer. Experts are in the last layer only: vLLM wants some."""
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=len(_LAYERS),
        layer_types=_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=_LINEAR_HEAD_DIM,
        linear_value_head_dim=_LINEAR_HEAD_DIM,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        mlp_only_layers=list(range(len(_LAYERS) - 1)),
        max_position_embeddings=8192,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
