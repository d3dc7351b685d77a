"""GGUF files: imported once, with the tokenizer and the chat template that transformers reads in them, or refused."""

import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf import GGUFWriter

from engine_model_rig import TABLE, gguf_read_once
from engine_process import FRANCE
from kvtier.errors import ConfigError, InvalidInputError
from kvtier.system.atomic_files import folder_published_at
from kvtier_engine.demo.demo_model import demo_model_path
from kvtier_engine.model.gguf_import import import_gguf
from kvtier_engine.model.model_folder import ModelFolder, open_model
from kvtier_engine.text.tokenizer import ChatTokenizer

STRINGS = [
    "", " ", "hello world", "  two  spaces   12  345", "2024-10-31T23:59:60Z", "x=1;y=22;z=333 4444", TABLE,
    "tabs\tand\n\n\nnewlines \r\n 7", "naïve café – “quotes” … №5 Ⅳ ½ ² ٣", "日本語のテキスト 123",
    "emoji 👩‍👩‍👧‍👦 7️⃣ end",
    "don't we'll I'm you've", "<|im_start|>user\nhi<|im_end|>\n", "def f(x):\n    return x[1:-1] + 0x1F  # comment",
    "\u00a0nbsp\u2003em space\u200bzero width", "a" * 300, "\x00\x01\ufffd",
]  # fmt: skip


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def smollm2(cache_dir: Path) -> ModelFolder:
    return open_model(demo_model_path(), cache_dir)


def test_import_is_reused_wherever_the_file_lies(tmp_path: Path, cache_dir: Path, smollm2: ModelFolder) -> None:
    folder = smollm2.weight_files[0].parent
    before = smollm2.weight_files[0].stat().st_mtime_ns
    copy = tmp_path / "renamed.gguf"
    shutil.copy(demo_model_path(), copy)
    assert import_gguf(copy, cache_dir) == folder
    assert smollm2.weight_files[0].stat().st_mtime_ns == before
    assert [p.name for p in cache_dir.iterdir() if p.name.startswith(".")] == []


def test_the_first_of_two_imports_stays_and_a_failed_one_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with folder_published_at(target) as slow:
        (slow / "config.json").write_text("slow")
        with folder_published_at(target) as fast:
            (fast / "config.json").write_text("fast")
    assert (target / "config.json").read_text() == "fast"
    with pytest.raises(FileNotFoundError), folder_published_at(tmp_path / "failed") as draft:
        (draft / "no such folder" / "config.json").write_text("")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("text", STRINGS, ids=range(len(STRINGS)))
def test_tokenizer_agrees_with_transformers(smollm2: ModelFolder, hf_tokenizer: Any, text: str) -> None:
    """transformers' tokenizer from the same GGUF lacks the `smollm` rule that every digit stands alone.

    llama.cpp applies that rule first, so the truth is transformers' encoding of the pieces between digits.
    """
    pieces, piece = [], ""
    for character in text:
        if unicodedata.category(character).startswith("N"):
            pieces += [piece, character]
            piece = ""
        else:
            piece += character
    expected = [token for part in (*pieces, piece) for token in hf_tokenizer.encode(part)]
    ours = smollm2.tokenizer.encode(text).tolist()
    assert ours == expected
    assert smollm2.tokenizer.decode(ours) == hf_tokenizer.decode(expected, skip_special_tokens=True)


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    path = demo_model_path()
    with gguf_read_once():
        return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_chat_template_agrees_with_transformers(smollm2: ModelFolder, hf_tokenizer: Any) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello, who are you?"},
        {"role": "assistant", "content": "A model."},
        {"role": "user", "content": "{{ 1 }} <|im_end|>"},
    ]
    for messages in (FRANCE, conversation):
        expected = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert smollm2.tokenizer.encode_chat(messages).tolist() == expected


def test_no_chat_template_is_an_error_of_the_request(tmp_path: Path, smollm2: ModelFolder) -> None:
    shutil.copy(smollm2.weight_files[0].parent / "tokenizer.json", tmp_path)
    with pytest.raises(InvalidInputError, match="/v1/completions"):
        ChatTokenizer(tmp_path).encode_chat(FRANCE)


def _small_gguf(path: Path, **rope: str | float) -> Path:
    """A Llama of 2 heads of 16, with all fields and no tensors."""
    writer = GGUFWriter(path, "llama")
    for key, number in {
        "embedding_length": 32, "feed_forward_length": 64, "block_count": 1, "attention.head_count": 2,
        "attention.head_count_kv": 1, "context_length": 128,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in rope.items():
        name = f"llama.rope.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, r"rope\.scaling\.type is 'linear'.*'none' only"),
        ({"scaling.type": "yarn"}, r"rope\.scaling\.type is 'yarn'"),
        ({"scaling.factor": 4.0}, r"rope\.scaling\.factor is 4\.0"),
        ({"scale_linear": 2.0}, r"rope\.scale_linear is 2\.0"),
        ({"dimension_count": 8}, r"rope\.dimension_count is 8.*computes 16 only"),
        ({"scaling.type": "none", "scaling.factor": 1.0, "dimension_count": 16}, "tokenizer of kind None"),
        ({}, "tokenizer of kind None"),
    ],
)
def test_gguf_with_another_rope_is_refused(tmp_path: Path, rope: dict[str, str | float], words: str) -> None:
    """A file with the engine's own rope would pass this check and fail at its missing tokenizer."""
    with pytest.raises(ConfigError, match=words + ".*Hugging Face folder"):
        open_model(_small_gguf(tmp_path / "small.gguf", **rope), tmp_path)


@pytest.mark.parametrize("length", [4, 20, 100, 5_000, 1_000_000, 10_000_000])
def test_a_torn_gguf_says_so(tmp_path: Path, length: int) -> None:
    with demo_model_path().open("rb") as whole:
        (tmp_path / "torn.gguf").write_bytes(whole.read(length))
    with pytest.raises(ConfigError, match=r"torn\.gguf cannot be read as GGUF: it is torn.*download it again"):
        open_model(tmp_path / "torn.gguf", tmp_path)


def test_no_such_model_and_garbled_gguf(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model at"):
        open_model(tmp_path / "nothing", tmp_path)
    garbled = tmp_path / "garbled.gguf"
    garbled.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        open_model(garbled, tmp_path)
