"""A small model of any family as transformers saves it, and a text to compute."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

TABLE = "| id | name | age | e-mail |\n| --- | ---: | --- | --- |\n" + "".join(
    f"| {i} | Anna-Lena Müller {i} | {20 + i} | a.m{i}@example.org |\n" for i in range(12)
)


def small_folder(parent: Path, family: str = "Llama", **changes: Any) -> tuple[Path, Any]:
    """A random model saved below `parent`, with a tokenizer of one token, and transformers' own object of it."""
    settings = {
        "vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    } | changes  # fmt: skip
    torch.manual_seed(5)
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else family + "Config")(**settings)
    model = getattr(transformers, family + "ForCausalLM")(config)
    for name, parameter in model.named_parameters():  # made as zeros and ones, which hide whether they are used
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    folder = parent / "tiny"
    model.save_pretrained(folder, max_shard_size="100KB")
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    return folder, model


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """transformers reads a GGUF file's fields three times over, and makes the same table of names for every module."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        yield
