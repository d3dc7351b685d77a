"""A PaddleOCR-VL of 1 million random parameters: it sees images of any size, and has positions in three dimensions."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_llama import SPREAD, VOCABULARY, write_tokenizer
from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration

HEAD_DIM, HIDDEN = 32, 192
PATCH, MERGED = 14, 2
TOKEN_PIXELS = PATCH * MERGED
"""Side of the square that becomes one token."""
IMAGE, VIDEO, START, END = VOCABULARY - 4, VOCABULARY - 3, VOCABULARY - 2, VOCABULARY - 1
"""Tokens."""
_AS_PUBLISHED = {"model.language_model.": "model.", "model.visual.": "visual.", "model.projector.": "mlp_AR."}
"""Beginnings of weights' names: the library's own, and those in checkpoints."""


def make(folder: Path, *, seed: int) -> None:
    """Writes configuration, weights, tokenizer and what prepares images."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _configuration()
    save_file(_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    write_tokenizer(folder)
    named = json.loads((folder / "tokenizer_config.json").read_text())
    named |= {"image_token": f"w{IMAGE - 3}", "extra_special_tokens": {"image_token": f"w{IMAGE - 3}"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    size = {"shortest_edge": TOKEN_PIXELS**2, "longest_edge": 100 * TOKEN_PIXELS**2}
    images = {"image_processor_type": "PaddleOCRVLImageProcessor", "size": size, "patch_size": PATCH}
    processor = {"processor_class": "PaddleOCRVLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images | processor | {"merge_size": MERGED}))
    (folder / "processor_config.json").write_text(json.dumps(processor))


def _weights(config: PaddleOCRVLConfig, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in PaddleOCRVLForConditionalGeneration(config).named_parameters()}
    weights = {}
    for name, shape in sorted(shapes.items()):
        is_norm = "norm" in name and name.endswith("weight")
        weight = torch.ones(shape) if is_norm else SPREAD * torch.randn(shape, generator=generator)
        start = next((start for start in _AS_PUBLISHED if name.startswith(start)), "")
        weights[_AS_PUBLISHED.get(start, "") + name.removeprefix(start)] = weight
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}


def _configuration() -> PaddleOCRVLConfig:
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "dtype": "bfloat16",
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
    }
    return PaddleOCRVLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
        architectures=["PaddleOCRVLForConditionalGeneration"],
        dtype="bfloat16",
    )
