"""LoRA adapters with random weights, as PEFT saves them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SMOLLM2 = {"self_attn.q_proj": (576, 576), "mlp.down_proj": (576, 1536)}
"""Outputs and inputs of some of its projections."""


def random_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]] = SMOLLM2,
    *,
    num_layers: int = 2,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Writes one of rank 4, for the first layers; a large one, so that answers differ. Returns the folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(num_layers):
        for name, (num_outputs, num_inputs) in shapes.items():
            base = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn((4, num_inputs), generator=generator) / num_inputs**0.5
            tensors[f"{base}.lora_B.weight"] = torch.randn((num_outputs, 4), generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    kept = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": sorted(shapes), "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(kept))
    return folder
