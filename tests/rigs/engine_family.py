"""Several engines of a tiny random model, each a process of its own, for the price of importing torch once.

As a program: `engine_family.py FOLDER CONFIG...` makes the model where it is missing, and serves.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from kvtier_bench.processes.engines_process import EngineProcess, engine_processes, serve

VOCABULARY = 300
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def engine_family(
    folder: Path, configs: Sequence[Path], environ: Mapping[str, str]
) -> AbstractContextManager[list[EngineProcess]]:
    """Engines with these configurations, in their order; leaving the context kills them.

    :param folder: where the model is, or is made: each configuration names it.
    """
    return engine_processes(configs, environ, [__file__, str(folder)])


def make_model(folder: Path) -> None:
    """Writes a small random Llama with a tokenizer of bytes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    hidden, inner, heads, kv_heads, dim, layers = 32, 48, 4, 2, 8, 2
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": dim,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "eos_token_id": VOCABULARY - 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj": (heads * dim, hidden), f"{prefix}.self_attn.k_proj": (kv_heads * dim, hidden),
            f"{prefix}.self_attn.v_proj": (kv_heads * dim, hidden), f"{prefix}.self_attn.o_proj": (hidden, heads * dim),
            f"{prefix}.mlp.gate_proj": (inner, hidden), f"{prefix}.mlp.up_proj": (inner, hidden),
            f"{prefix}.mlp.down_proj": (hidden, inner), f"{prefix}.input_layernorm": (hidden,),
            f"{prefix}.post_attention_layernorm": (hidden,),
        }  # fmt: skip
    torch.manual_seed(7)
    save_file(
        {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    make_tokenizer(folder)


def make_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of bytes, with two special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from kvtier_engine.text.detokenizer import BYTE_OF_CHARACTER

    alphabet = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def _main(folder: Path, configs: Sequence[Path]) -> None:
    if not folder.exists():
        make_model(folder)
    serve(configs)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
