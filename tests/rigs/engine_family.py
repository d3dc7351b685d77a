"""Several engines of a tiny random model, each a process of its own, for the price of importing torch once.

As a program: `engine_family.py FOLDER CONFIG...` imports, forks one engine for each configuration, which writes its
standard output beside that, and ends them when its standard input ends.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from cache_pool import until

VOCABULARY = 300
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


class EngineFamily:
    """A context manager: leaving it kills all engines."""

    def __init__(self, folder: Path, configs: Sequence[Path], environ: Mapping[str, str]) -> None:
        """:param folder: where the model is, or is made: each configuration names it."""
        self._folder, self._configs, self._environ = folder, configs, environ

    def __enter__(self) -> "EngineFamily":
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._folder), *map(str, self._configs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._environ},
        )
        assert self._process.stdout is not None
        self.pids = json.loads(self._process.stdout.readline() or "[]")
        outputs = [config.with_suffix(".out") for config in self._configs]
        until(lambda: all("\n" in output.read_text() for output in outputs), "engines are ready")
        self.urls = [output.read_text().split("url=")[1].strip() for output in outputs]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=60)


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
    # All that an engine needs, before the first fork.
    import uvicorn  # noqa: F401

    import kvtier_engine.api.server
    import kvtier_engine.assemble  # noqa: F401
    from kvtier.config import load_config
    from kvtier.system.logs import set_up_logs
    from kvtier_engine.cli import run

    if not folder.exists():
        make_model(folder)
    pids = []
    for config in configs:
        output = config.with_suffix(".out").open("w")
        pid = os.fork()
        if not pid:
            os.dup2(output.fileno(), 1)
            os.close(0)
            with config.with_suffix(".log").open("w") as log:
                set_up_logs(stream=log)
                run(load_config(config))
            os._exit(0)
        output.close()
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
