"""LoRA adapters: KV is kept by their content, and by nothing else of them."""

import os
import shutil
from pathlib import Path

import pytest
import tiny_llama
from engine_lab import Engine, Lab
from vllm.lora.request import LoRARequest
from vllm_rig import Answer, all_hit, cached_of, make_prompts, none_hit, settings, tokens_of, transfer

from cache_pool import CachePool, until
from kvtier_vllm.content.adapters import Adapters, source_of

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
PROMPTS = make_prompts(3)


def _digest(adapters: Adapters, folder: Path, number: int = 1) -> bytes:
    """As soon as it is known."""
    request, found = LoRARequest("any", number, str(folder)), []

    def known() -> bool:
        found[:] = [adapters.digest(request)]
        return found[0] is not None

    until(known, f"the digest of {folder}")
    assert isinstance(found[0], bytes)
    return found[0]


def test_an_adapter_is_what_is_in_it(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path / "digests", "")
    tiny_llama.make_adapter(tmp_path / "one", seed=1)
    tiny_llama.make_adapter(tmp_path / "same", seed=1)
    tiny_llama.make_adapter(tmp_path / "weights", seed=2)
    tiny_llama.make_adapter(tmp_path / "scale", seed=1, alpha=16)
    one, same, weights, scale = (
        _digest(adapters, tmp_path / name, number) for number, name in enumerate(("one", "same", "weights", "scale"), 1)
    )
    assert one == same
    in_fewer_modules = Adapters(tmp_path / "digests", "modules=['o_proj']")
    assert len({one, weights, scale, _digest(in_fewer_modules, tmp_path / "one")}) == 4
    adapters.close()
    in_fewer_modules.close()


def test_an_adapter_that_changes_is_not_kept(tmp_path: Path) -> None:
    adapters = Adapters(tmp_path / "digests", "")
    tiny_llama.make_adapter(tmp_path / "one", seed=1)
    _digest(adapters, tmp_path / "one")
    weights = tmp_path / "one" / "adapter_model.safetensors"
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    request = LoRARequest("any", 1, str(tmp_path / "one"))
    assert adapters.digest(request) is None
    content[-1] ^= 1
    weights.write_bytes(content)
    assert adapters.digest(request) is None, "vLLM may have loaded it in between"
    adapters.close()


def test_an_adapter_loaded_in_another_way_than_a_request_says_is_not_kept(tmp_path: Path) -> None:
    """vLLM loads an id once, and goes by that."""
    adapters = Adapters(tmp_path / "digests", "")
    tiny_llama.make_adapter(tmp_path / "one", seed=1)
    digest = _digest(adapters, tmp_path / "one")
    adapters.note_loaded(adapters.take_unsent())
    flat, in_3d = (LoRARequest("any", 1, str(tmp_path / "one"), is_3d_lora_weight=is_3d) for is_3d in (False, True))
    assert adapters.digest(in_3d) is None
    assert adapters.digest(flat) == digest
    adapters.note_loaded({1: source_of(in_3d)})
    until(lambda: adapters.digest(in_3d) is not None, "its digest as it was loaded last")
    assert adapters.digest(in_3d) != digest
    assert adapters.digest(flat) is None
    adapters.close()


@pytest.mark.parametrize("what", ["a name", "no weights", "no configuration", "garbled"])
def test_what_cannot_be_told_by_its_content_is_left_alone(tmp_path: Path, what: str) -> None:
    adapters = Adapters(tmp_path / "digests", "")
    folder = tmp_path / "one"
    tiny_llama.make_adapter(folder, seed=1)
    if what == "a name":
        shutil.rmtree(folder)
    elif what == "no weights":
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    elif what == "no configuration":
        (folder / "adapter_config.json").unlink()
    else:
        (folder / "adapter_model.safetensors").write_bytes(b"garbled")
    request = LoRARequest("any", 1, str(folder))
    assert adapters.digest(request) is None
    until(lambda: all(known.digest.done() for known in adapters._known.values()), "the adapter was read")
    assert adapters.digest(request) is None
    adapters.close()


def _await_kept(engine: Engine, adapter: Path) -> None:
    """Until the engine keeps what it computes with this adapter: nothing is kept before its content is known."""

    def hits() -> bool:
        engine.reset()
        return cached_of(engine.generate(make_prompts(1, seed=1), num_tokens=1, adapter=adapter)) != [0]

    until(hits, f"a prompt with {adapter} is kept")


def test_engines_share_adapters_by_content(lab: Lab, pool: CachePool, expected: list[Answer]) -> None:
    one, moved, other = (lab.home / name for name in ("adapter-one", "adapter-moved", "adapter-other"))
    tiny_llama.make_adapter(one, seed=1)
    tiny_llama.make_adapter(other, seed=2)
    connector = transfer(settings(pool={"address": pool.address}))
    with lab.engine(**LORA) as engine:
        wanted = [tokens_of(engine.generate(PROMPTS, adapter=adapter)) for adapter in (one, other)]
    assert wanted[0] != wanted[1] != tokens_of(expected)[:3]
    with lab.engine(connector, **LORA) as engine:
        _await_kept(engine, one)
        assert tokens_of(engine.generate(PROMPTS, adapter=one)) == wanted[0]
        assert tokens_of(engine.generate(PROMPTS)) == tokens_of(expected)[:3]
    one.rename(moved)
    with lab.engine(connector, **LORA) as engine:
        for adapter in (moved, other):
            _await_kept(engine, adapter)
        again, theirs = engine.generate(PROMPTS, adapter=moved), engine.generate(PROMPTS, adapter=other)
        base = engine.generate(PROMPTS)
    assert (tokens_of(again), cached_of(again)) == (wanted[0], all_hit(PROMPTS))
    assert (tokens_of(theirs), cached_of(theirs)) == (wanted[1], none_hit(PROMPTS))
    assert (tokens_of(base), cached_of(base)) == (tokens_of(expected)[:3], all_hit(PROMPTS))
