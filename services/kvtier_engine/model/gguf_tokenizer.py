"""The tokenizer inside a GGUF file, as a `tokenizers.Tokenizer`."""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kvtier.errors import ConfigError

_CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of special tokens (llama.cpp, `LLAMA_TOKEN_TYPE_CONTROL`)."""
_USER_DEFINED_TOKEN = 4


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    # llama.cpp's `smollm`: every digit stands alone before the GPT-2 expression splits the rest.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {"gpt-2": _gpt2, "smollm": _smollm}


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """A byte-level BPE tokenizer from the `tokenizer.ggml.*` fields of a GGUF file.

    :param metadata: the file's fields by name, as Python values.
    :param source: how errors name the file.
    :raises ConfigError: the file has no tokenizer, or one of a kind that this engine does not build.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS or not tokens or merges is None:
        raise ConfigError(
            f"{source}: tokenizer of kind {kind!r}, pre-tokenizer {pre!r}; this engine builds 'gpt2' with "
            f"{' or '.join(map(repr, _PRE_TOKENIZERS))}. Give it the model's Hugging Face folder instead"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    named = [(token, t) for token, t in zip(tokens, types, strict=False) if t in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN)]
    tokenizer.add_tokens(
        [AddedToken(token, special=t == _CONTROL_TOKEN, normalized=False) for token, t in named]
    )  # fmt: skip
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos_id = int(metadata["tokenizer.ggml.bos_token_id"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)]
        )
    return tokenizer
