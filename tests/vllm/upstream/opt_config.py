"""A model for `ModelConfig`: a configuration only, with which nothing has to be looked up anywhere."""

import json
from pathlib import Path

OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16384,
    "vocab_size": 50272,
    "word_embed_proj_dim": 64,
    "torch_dtype": "float16",
}


def write_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OPT))
    return folder
