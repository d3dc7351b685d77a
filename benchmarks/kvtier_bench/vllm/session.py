"""The engines of a run, started side by side, and what they have in common."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import KvtierError
from kvtier_bench.measuring.rounds import progress
from kvtier_bench.processes.peers import PREPARED
from kvtier_bench.processes.pool_process import PoolProcess
from kvtier_bench.vllm.contenders import BLOCK, SECRET_ENVIRON, TOKEN_ENVIRON, Contender
from kvtier_bench.vllm.engine_process import EngineProcess, Launch, engine_process

_KV_GIB = 1
_ROOM = 4
"""Device blocks, in those of all prompts that are there at once."""
_MAX_BATCHED_TOKENS = 2048
"""The least number of tokens that a step may have. Prompts are computed in one: how vLLM divides them is not what is
measured."""


@dataclass(frozen=True, slots=True)
class Session:
    """Says where and how engines of this run are started."""

    folder: Path
    """The folder for the engines' logs and files."""
    model: Path
    """A folder with safetensors."""
    pool: PoolProcess
    peers: Path
    """What `make peers` has prepared."""
    threads: int
    """The threads that each engine's model computes with; 0: one per core."""

    @contextmanager
    def started(
        self, contenders: Sequence[Contender], *, prompt_tokens: int, at_once: int = 1, notes: list[str]
    ) -> Iterator[dict[str, EngineProcess]]:
        """Engines that are ready, by name. A peer that does not start is left out, with a line in `notes`.

        :param prompt_tokens: of the longest prompt, with what is answered.
        :param at_once: prompts that an engine has at a time.
        """
        with ExitStack() as stack, progress("start engines", len(contenders)) as advance:
            ready: dict[str, EngineProcess] = {}
            # One alone: what vLLM finds out about a model, it leaves in its home for the others.
            for some in (contenders[:1], contenders[1:]):
                starting = []
                for contender in some:
                    with _left_out(contender, notes):
                        launch = self._launch(contender, prompt_tokens, at_once)
                        engine = stack.enter_context(engine_process(contender.name, launch, self.folder))
                        starting.append((contender, engine))
                for contender, engine in starting:
                    with _left_out(contender, notes):
                        engine.ready()
                        if contender.peer is not None:
                            engine.require_clean_start()
                        ready[contender.name] = engine
                    advance()
            yield ready

    def _launch(self, contender: Contender, prompt_tokens: int, at_once: int) -> Launch:
        length = prompt_tokens + BLOCK
        options: dict[str, Any] = {
            "model": str(self.model),
            "enforce_eager": True,
            "dtype": "bfloat16",
            "block_size": BLOCK,
            "max_model_len": length,
            "max_num_seqs": at_once,
            "num_gpu_blocks_override": _ROOM * at_once * -(-length // BLOCK),
            "max_num_batched_tokens": max(length, _MAX_BATCHED_TOKENS),
            "kv_transfer_config": contender.transfer,
            **contender.options,
        }
        environ: Mapping[str, str] = {
            SECRET_ENVIRON: "of a benchmark, shared with nobody",
            TOKEN_ENVIRON: self.pool.token,
        }
        packages = [] if contender.peer is None else [self._packages(contender.name, contender.peer)]
        return Launch(options, _KV_GIB, self.threads, packages, environ)

    def _packages(self, name: str, peer: str) -> Path:
        """Returns the folder that a peer's packages are in. Raises `KvtierError` if they are not prepared."""
        environment = self.peers / peer
        if not (environment / PREPARED).exists():
            raise KvtierError(f"{name}: nothing in {environment}; make peers prepares it")
        return next((environment / "lib").glob("python3.*/site-packages"))


@contextmanager
def _left_out(contender: Contender, notes: list[str]) -> Iterator[None]:
    """A peer whose start fails becomes a line in `notes`."""
    try:
        yield
    except KvtierError as error:
        if contender.peer is None:
            raise
        notes.append(f"Without {str(error).splitlines()[0]}.")
