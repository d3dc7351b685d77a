"""vLLM engines and its OpenAI server, each in processes of their own. Every wait has a bound."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from lab_child import STOP_S, Child, tail_of
from vllm_rig import BLOCK, ENVIRON, NUM_TOKENS, Adapter, Answer, Picture

from cache_pool import WAIT_S, until

CHILD = Path(__file__).with_name("engine_child.py")
SERVERS = CHILD.with_name("server_child.py")
Server = tuple[Mapping[str, Any] | None, Mapping[str, Any]]
"""Connector, or None for none, and options of a server."""
KV_BYTES = 256 << 20
"""The bytes of an engine's device, which it fills with zeros at its start."""


class Engine:
    """A running `LLM`. One command at a time."""

    def __init__(self, child: Child, model: Path | str) -> None:
        """
        :param child: without an engine.
        :param model: its folder or its name.
        """
        self._child, self._model = child, model
        self._begun_at = 0
        """Its start, in what the child prints."""
        self.facts: dict[str, Any] = {}
        """What the engine said of itself at its start."""

    def start(
        self,
        connector: Mapping[str, Any] | None,
        *,
        processes: bool = False,
        async_scheduling: bool = False,
        **options: Any,
    ) -> None:
        """Raises `EngineError`.

        :param connector: as for `Lab.engine`, and so are the others.
        """
        self._begun_at = len(self._child.output())
        how = {"processes": processes, "async_scheduling": async_scheduling}
        self.facts = self._child.call("start", options=_options(self._model, options), transfer=connector, **how)

    def start_beside(self, model: Path) -> str:
        """Why another engine in its process does not start, with that model and no connector; empty if it does."""
        return str(self._child.call("start_beside", options=_options(model, {})))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_tokens: int = NUM_TOKENS,
        salt: str | None = None,
        adapter: Path | Adapter | None = None,
        params: Mapping[str, Any] | None = None,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> list[Answer]:
        """:param pictures: of each prompt, if any have some."""
        self.begin_generate(
            prompts, num_tokens=num_tokens, salt=salt, adapter=adapter, params=params, pictures=pictures
        )
        return self.end_generate()

    def begin_generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_tokens: int = NUM_TOKENS,
        salt: str | None = None,
        adapter: Path | Adapter | None = None,
        params: Mapping[str, Any] | None = None,
        pictures: Sequence[Sequence[Picture]] = (),
    ) -> None:
        """Does not wait for the answers: `end_generate` does."""
        lora = str(adapter) if isinstance(adapter, Path) else adapter
        how = {"max_tokens": num_tokens, "salt": salt, "adapter": lora, "params": params, "pictures": pictures}
        self._child.send("generate", prompts=prompts, **how)

    def end_generate(self) -> list[Answer]:
        return [Answer(**each) for each in self._child.answer()]

    def restart(self, connector: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Ends this engine in good order and starts another one of its model in its process.

        :param connector: as for `Lab.engine`, and so are options.
        """
        self.stop()
        self.start(connector, **options)

    def reset(self, *, connector: bool = False) -> None:
        """Empties vLLM's prefix cache, and with `connector` also what this engine's connector holds.

        vLLM refuses as long as blocks are in use, which those of a load or save under way may be.
        """
        until(lambda: bool(self._child.call("reset", connector=connector)), "vLLM's prefix cache could be reset")

    def reload_weights(self, model: Path | None = None) -> None:
        """From this folder, or from the one that it has loaded last."""
        self.call_workers("reload_weights", **({} if model is None else {"weights_path": str(model)}))

    def call_workers(self, method: str, **arguments: Any) -> None:
        """One of their methods, in all ranks."""
        self._child.call("call_workers", method=method, arguments=arguments)

    def load_past_vllm(self, model: Path, name: str) -> None:
        """One weight from this folder, right into the model."""
        self._child.call("load_past_vllm", path=str(model), weight=name)

    def sleep(self, level: int) -> None:
        """And wakes up."""
        self._child.call("sleep", level=level)
        self._child.call("wake_up")

    def load_adapter(self, adapter: Path, path: Path) -> None:
        """From this folder, in place of one that may be in use: both folders mean it then."""
        self._child.call("load_adapter", adapter=str(adapter), path=str(path))

    @property
    def pid(self) -> int:
        """The id of the process that the engine runs in, unless it has processes of its own."""
        return self._child.pid

    def is_idle(self) -> bool:
        """Whether its connector has nothing left to do. For an engine in one process."""
        return bool(self._child.call("is_idle"))

    def note_steps(self) -> None:
        """From now on, notes what `noted` gives. For an engine in one process."""
        self._child.call("note_steps")

    def noted(self) -> list[Any]:
        """What happened since the last call, in order: ids that a step schedules, or `loaded`, by a worker's answer."""
        return list(self._child.call("noted"))

    def counter(self, name: str) -> int:
        """One of vLLM's."""
        return int(self._child.call("counters").get(name, 0))

    def output(self) -> str:
        """What it has printed since its start."""
        return self._child.output()[self._begun_at :].decode(errors="replace")

    def stop(self) -> None:
        """Ends in good order: what was saved is stored."""
        self._child.call("stop")


@dataclass
class Lab:
    """Where engines run: with a home of their own, so that nothing of whoever works here is used or changed."""

    home: Path
    model: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _idle: Child | None = None
    """Without an engine, for the next one."""

    @contextlib.contextmanager
    def engine(
        self,
        connector: Mapping[str, Any] | None = None,
        *,
        model: Path | str | None = None,
        own_process: bool = False,
        **options: Any,
    ) -> Iterator[Engine]:
        """A started engine; leaving the context stops it, and fails when it does not end well.

        :param connector: see `transfer`; None for none.
        :param own_process: not one that had other engines before, which starts sooner.
        :param options: of `LLM`; and `processes`, for scheduler and worker in processes of their own instead of both in
            that one, and `async_scheduling`.
        """
        child, self._idle = (None, self._idle) if own_process else (self._idle, None)
        if child is None:
            child = self._child()
        try:
            engine = Engine(child, model or self.model)
            engine.start(connector, **options)
            yield engine
            engine.stop()
        except BaseException:
            child.kill()
            raise
        if not own_process and self._idle is None:
            self._idle = child
        else:
            child.end()

    def keep_a_process(self) -> None:
        """There is one for the next engine: of no module that it would seem to be left behind by."""
        if self._idle is None:
            self._idle = self._child()

    def close(self) -> None:
        """Ends what has no engine."""
        if self._idle is not None:
            self._idle.end()

    def _child(self) -> Child:
        """To be ended or killed."""
        read_end, write_end = os.pipe()
        log = self.home / f"engine-{next(self._numbers)}.log"
        with contextlib.ExitStack() as stack:
            stack.enter_context(os.fdopen(read_end, "rb"))
            command = [sys.executable, str(CHILD), str(write_end)]
            process = stack.enter_context(self._running(command, log, pass_fds=[write_end]))
            os.close(write_end)
            return Child(process, read_end, log, stack.pop_all())

    @contextlib.contextmanager
    def server(self, connector: Mapping[str, Any], **options: Any) -> Iterator[httpx.Client]:
        """vLLM's OpenAI server, when it is healthy."""
        with self.servers([(connector, options)]) as (client,):
            yield client

    @contextlib.contextmanager
    def servers(
        self, wanted: Sequence[tuple[Mapping[str, Any] | None, Mapping[str, Any]]]
    ) -> Iterator[list[httpx.Client]]:
        """Several of them, and a client of each, when all are healthy.

        :param wanted: with the option `port`, it listens on 127.0.0.1 in place of a Unix socket, which nobody else can
            take.
        """
        number = next(self._numbers)
        log = self.home / f"server-{number}.log"
        command, clients = [sys.executable, str(SERVERS)], []
        with contextlib.ExitStack() as stack:
            for place, (connector, options) in enumerate(wanted):
                flags = _shared_options(self.model, options) | {"host": "127.0.0.1"}
                socket = None if "port" in options else str(self.home / f"server-{number}-{place}.sock")
                flags |= {} if socket is None else {"uds": socket}
                flags |= {} if connector is None else {"kv_transfer_config": dict(connector)}
                command.append(json.dumps(_as_flags(flags)))
                connect = httpx.HTTPTransport(uds=socket, limits=httpx.Limits(max_keepalive_connections=0))
                url = f"http://127.0.0.1:{options.get('port', 80)}"
                clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=WAIT_S, transport=connect)))
            process = stack.enter_context(self._running(command, log))

            def healthy(client: httpx.Client) -> bool:
                assert process.poll() is None, f"the servers have ended; {tail_of(log)}"
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/health").status_code == 200
                return False

            until(lambda: all(map(healthy, clients)), f"the servers are healthy; {log}")
            yield clients
            process.terminate()
            process.wait(STOP_S)

    @contextlib.contextmanager
    def _running(self, command: list[str], log: Path, **how: Any) -> Iterator["subprocess.Popen[str]"]:
        """A process in a session of its own; it and all that it has started are gone at the end."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=os.environ | ENVIRON | {"HOME": str(self.home)},
                text=True,
                start_new_session=True,
                **how,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_S)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _options(model: Path | str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM`."""
    return _shared_options(model, options) | {"disable_log_stats": False}


def _shared_options(model: Path | str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `LLM` and the server have in common."""
    return {
        "model": str(model),
        "enforce_eager": True,
        # In bfloat16 the two likeliest tokens often have the same logit, and which one is said depends on the order of
        # sums: on what else is in the batch, and so on when a load has ended.
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": KV_BYTES,
        **options,
    }


def _as_flags(options: Mapping[str, Any]) -> list[str]:
    """Options of `LLM` as the server's command line takes them."""
    flags: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags += [flag] if value else [f"--no-{flag[2:]}"]
        else:
            flags += [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return flags
