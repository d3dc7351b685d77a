"""What is read of a GGUF file's header, beside what the package `gguf` reads there."""

import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFWriter

from kvtier.errors import ConfigError
from kvtier.identity.gguf_file import read_gguf
from kvtier.identity.gguf_header import read_gguf_header
from kvtier_engine.demo.demo_model import demo_model_path


def single_values(path: Path) -> dict[str, object]:
    _, fields = read_gguf(path)
    return {
        name: value for name, value in fields.items() if not isinstance(value, list) and not name.startswith("GGUF.")
    }


def test_it_is_what_the_package_reads_in_a_fraction_of_the_time() -> None:
    begun = time.thread_time()
    found = read_gguf_header(demo_model_path())
    read = time.thread_time()
    assert found == single_values(demo_model_path())
    assert read - begun < (time.thread_time() - read) / 5


@pytest.mark.parametrize("order", GGUFEndian)
def test_all_types_and_both_orders(tmp_path: Path, order: GGUFEndian) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama", endianess=order)
    for kind, value in (("uint8", 1), ("int8", -1), ("uint16", 2), ("int16", -2), ("uint32", 3), ("int32", -3),
                        ("uint64", 1 << 40), ("int64", -4), ("float32", 0.5), ("float64", 0.1), ("bool", True),
                        ("string", "naïve")):  # fmt: skip
        getattr(writer, f"add_{kind}")(kind, value)
    for name, values in (("numbers", [1, 2]), ("words", ["a", "bc"]), ("truths", [True, False]), ("lists", [[1], [2]])):
        writer.add_array(name, values)
    writer.add_tensor("weights", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf_header(path) == single_values(path)
    whole = path.read_bytes()
    for nbytes in (0, 3, 10, 60, len(whole) - 256):
        path.write_bytes(whole[:nbytes])
        with pytest.raises(ConfigError, match=r"model\.gguf cannot be read as GGUF"):
            read_gguf_header(path)
