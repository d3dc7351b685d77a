"""vLLM by itself, with its own prefix cache: what kvtier's engine is compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.system.working_folder import working_folder
from kvtier_bench.measuring.workloads import LONGEST_TOKENS, MAX_RUNNING
from kvtier_bench.vllm.command import require_vllm
from kvtier_bench.vllm.contenders import BLOCK
from kvtier_bench.vllm.engine_process import EngineProcess, Launch, engine_process

NAME = "vLLM"
_KV_GIB = 1


@contextmanager
def vllm_engine(
    model: Path, dtype: str, threads: int, kv_tokens: int, *, longest_tokens: int = LONGEST_TOKENS
) -> Iterator[tuple[str, EngineProcess]]:
    """An engine that is ready, and its name.

    :param model: a folder of safetensors, or a GGUF file.
    :param threads: of its model; 0: one per core.
    :param kv_tokens: what it has room for.
    :param longest_tokens: no prompt with its answer has more.
    :raises KvtierError: vLLM is not installed here, or does not start; with its own words.
    """
    require_vllm()
    # Imported here: it loads numpy and gguf.
    from kvtier_engine.model.gguf_import import import_gguf

    with working_folder() as folder:
        options = {
            "model": str(import_gguf(model, folder / "models") if model.is_file() else model),
            "dtype": dtype,
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": longest_tokens,
            "max_num_seqs": MAX_RUNNING,
            "num_gpu_blocks_override": kv_tokens // BLOCK,
        }
        with engine_process(NAME, Launch(options, _KV_GIB, threads), folder) as engine:
            engine.ready()
            yield NAME, engine
