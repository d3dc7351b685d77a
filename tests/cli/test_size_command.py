"""`kvtier size`: bytes of KV by the shape of models, and what is worth fetching."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from gguf import GGUFWriter

from kvtier.cli.sizing.cli import size
from kvtier.cli.sizing.estimate import Demand, break_even_bytes_per_s, estimate, ways
from kvtier.cli.sizing.model_shape import load_model_shape
from kvtier.errors import ConfigError
from kvtier.identity.gguf_file import read_gguf

LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


def folder(tmp_path: Path, raw: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


@pytest.mark.parametrize(
    ("raw", "values", "windowed"),
    [
        (LLAMA_8B, 32 * 2 * 8 * 128, 0),
        ({**LLAMA_8B, "head_dim": 256}, 32 * 2 * 8 * 256, 0),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, 2 * 2 * 4 * 16, 0),
        ({**LLAMA_8B, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * 576, 0),
        ({"text_config": LLAMA_8B, "vision_config": {}}, 32 * 2 * 8 * 128, 0),
        ({**LLAMA_8B, "layer_types": ["sliding_attention"] * 24 + ["full_attention"] * 8}, 8 * 2 * 8 * 128, 24),
        ({**LLAMA_8B, "sliding_window": 4096}, 0, 32),
        ({**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False}, 32 * 2 * 8 * 128, 0),
    ],
)
def test_what_a_token_takes(tmp_path: Path, raw: Any, values: int, windowed: int) -> None:
    shape = load_model_shape(folder(tmp_path, raw))
    assert (shape.kv_values_per_token, shape.num_windowed_layers) == (values, windowed)
    assert shape.bytes_per_token("bfloat16") == 2 * values


@pytest.mark.parametrize(
    ("raw", "part"),
    [({}, "num_hidden_layers"), ({**LLAMA_8B, "num_hidden_layers": "x"}, "num_hidden_layers"), ([], "not a table")],
)
def test_what_is_no_model_is_said(tmp_path: Path, raw: Any, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        load_model_shape(folder(tmp_path, raw))
    with pytest.raises(ConfigError, match=r"cannot read"):
        load_model_shape(tmp_path / "nowhere")


GEMMA = {**LLAMA_8B, "num_hidden_layers": 26, "model_type": "gemma3_text", "sliding_window": 512}
KINDS = [("full" if layer % 6 == 5 else "sliding") + "_attention" for layer in range(26)]


@pytest.mark.parametrize(
    ("raw", "full"), [(GEMMA, 4), ({**GEMMA, "model_type": "gemma2"}, 13), ({**GEMMA, "layer_types": KINDS}, 4)]
)
def test_windows_count_once_in_a_conversation(tmp_path: Path, raw: Any, full: int) -> None:
    shape, of_layer = load_model_shape(folder(tmp_path, raw)), 2 * 8 * 128
    assert shape.kv_values_per_token == full * of_layer
    assert shape.window_bytes("bfloat16", 4096) == 512 * (26 - full) * of_layer * 2
    assert shape.window_bytes("fp8", 100) == 100 * (26 - full) * of_layer
    found = estimate(Demand(100, 16, 40, conversations=10, active_conversations=2, window_bytes=50))
    assert (found.conversation_bytes, found.disk_bytes) == (3250, 32500)
    assert found.memory_bytes == 2 * 2 * (1600 + 768) + 2 * 50


def gguf_file(path: Path, architecture: str, **numbers: int) -> Path:
    writer = GGUFWriter(path, architecture)
    for name, number in numbers.items():
        writer.add_uint32(f"{architecture}.{name.replace('__', '.')}", number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_measured_as_a_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"block_count": 32, "attention__head_count": 32, "attention__head_count_kv": 8, "embedding_length": 4096}
    shape = load_model_shape(gguf_file(tmp_path / "small.gguf", "llama", **numbers))
    assert (shape.name, shape.kv_values_per_token) == ("small", 32 * 2 * 8 * 128)
    numbers["attention__key_length"] = 256
    assert (
        load_model_shape(gguf_file(tmp_path / "wide.gguf", "qwen3", **numbers)).kv_values_per_token == 32 * 2 * 8 * 256
    )
    for path, words in (
        (gguf_file(tmp_path / "gemma.gguf", "gemma3", **numbers), "'gemma3'.*name the model's Hugging Face folder"),
        (gguf_file(tmp_path / "bare.gguf", "llama"), "num_hidden_layers"),
        (tmp_path / "nowhere.gguf", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_model_shape(path)
    (tmp_path / "torn.gguf").write_bytes((tmp_path / "small.gguf").read_bytes()[:60])
    with pytest.raises(ConfigError, match=r"torn\.gguf cannot be read as GGUF"):
        load_model_shape(tmp_path / "torn.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert load_model_shape(tmp_path / "small.gguf") == shape, "the package is for weights"
    with pytest.raises(ConfigError, match="pip install gguf"):
        read_gguf(tmp_path / "small.gguf")


def test_only_full_blocks_are_kept() -> None:
    found = estimate(Demand(100, 16, 40, conversations=10, active_conversations=2))
    assert (found.block_bytes, found.conversation_bytes, found.disk_bytes) == (1600, 3200, 32000)
    assert found.memory_bytes == 2 * 2 * (1600 + 768)


def test_at_the_break_even_fetching_takes_as_long_as_computing() -> None:
    bandwidth = break_even_bytes_per_s(131_072, 9000)
    assert bandwidth == pytest.approx(1.18e9, rel=0.01)
    for way in ways(131_072 * 4096, 4096, 9000):
        assert way.gain is not None
        assert (way.gain > 1) == (way.bytes_per_s > bandwidth), way


def test_the_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(size)
    runner, model = typer.testing.CliRunner(), str(folder(tmp_path, LLAMA_8B))
    answer = json.loads(runner.invoke(app, [model, "--json", "--conversations", "50"]).stdout)
    assert (answer["bytes_per_token"], answer["active_conversations"]) == (131_072, 5)
    assert answer["disk_bytes"] == 50 * 4096 * 131_072
    assert answer["break_even_bytes_per_s"] is None
    shown = runner.invoke(app, [model, "--prefill-tokens-per-s", "9000", "--hosts", "4"]).stdout
    assert "128 KiB of KV a token" in shown
    assert "on each of 4 hosts" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80
    too_many = runner.invoke(app, [model, "--conversations", "5", "--active", "6"])
    assert isinstance(too_many.exception, ConfigError)
