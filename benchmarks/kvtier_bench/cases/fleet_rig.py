"""Real engines of ours with a pool and without, and gateways before them."""

import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from kvtier.system.processes import Service
from kvtier.traces.form import Request
from kvtier_bench.cases.fleet_load import TOKENS_PER_BLOCK, Answered, replay
from kvtier_bench.processes.engines_process import engine_processes
from kvtier_bench.processes.pool_process import pool_process
from kvtier_engine.demo.demo_model import demo_model_path
from kvtier_engine.model.model_folder import DEFAULT_CACHE_DIR, open_model

NUM_ENGINES = 3
KV_BYTES, HOST_BYTES = 64 << 20, 64 << 20
BATCH_TOKENS = 512
_POOL_BYTES = 1 << 30
_CALIBRATION_TOKENS = 512
_CALIBRATION_KEYS = 1 << 48
"""Above those of all rounds."""
_NUM_CALIBRATIONS = 3
_SECRET = "a secret of the benchmark"


class FleetRig:
    """Two groups of engines, of which one has a pool; only one is asked at a time."""

    def __init__(self, folder: Path, dtype: str, stack: ExitStack) -> None:
        """Starts pool and engines; they end with `stack`."""
        models = Path(os.environ.get("KVTIER__ENGINE__MODEL_CACHE_DIR", DEFAULT_CACHE_DIR))
        self._tokenizer = open_model(demo_model_path(), models).weight_files[0].parent
        self._folder, self._dtype, self._key = folder, dtype, secrets.token_hex(16)
        pool = stack.enter_context(pool_process(folder, _POOL_BYTES))
        self._tenant = pool.tenant
        self._environ = {"BENCH_SECRET": _SECRET, "BENCH_TOKEN": pool.token}
        self._pool = f'[pool]\naddress = "{pool.unix}"\n'
        configs = [self._engine(number, with_pool) for with_pool in (False, True) for number in range(NUM_ENGINES)]
        urls = [url for _, url in stack.enter_context(engine_processes(configs, self._environ))]
        self.urls = {False: urls[:NUM_ENGINES], True: urls[NUM_ENGINES:]}
        """The addresses of engines, by whether they have the pool."""

    @contextmanager
    def gateway(self, strategy: str, with_pool: bool, engines: Sequence[int] = range(NUM_ENGINES)) -> Iterator[str]:
        """The URL of a new gateway before these engines."""
        named = []
        for number in engines:
            address = self._events(number, with_pool)
            places = f'events = "{address}", events_replay = "{address}-replay"'
            named.append(f'{{url = "{self.urls[with_pool][number]}", {places}}}')
        config = self._folder / "gateway.toml"
        config.write_text(
            f'[gateway]\nlisten = "127.0.0.1:0"\nstatus_listen = "127.0.0.1:0"\nengines = [{", ".join(named)}]\n'
            f'strategy = "{strategy}"\ntokenizer = "{self._tokenizer}"\nprobe_interval_s = 0.5\n'
            f'probe_timeout_s = 10\nprobe_failures = 10\n[api_keys.bench]\ntenant = "{self._tenant}"\n'
            f'key_sha256 = ["{hashlib.sha256(self._key.encode()).hexdigest()}"]\n'
            f"{self._tables()}{self._pool if with_pool else ''}"
        )
        arguments = ["gateway", "serve", "--config", str(config)]
        with Service(arguments, log=self._folder / "gateway.log", environ=self._environ) as service:
            yield service.ready()["url"]

    def run(self, strategy: str, with_pool: bool, requests: Sequence[Request]) -> list[Answered]:
        """Sends the requests through a new gateway with this strategy."""
        with self.gateway(strategy, with_pool) as url:
            return replay(url, self._key, requests)

    def speeds(self) -> tuple[float, float]:
        """Seconds that a token of a prompt takes while all engines of a group compute, and those of one step after."""
        num_blocks = _CALIBRATION_TOKENS // TOKENS_PER_BLOCK
        answers: list[Answered] = []
        for turn in range(1 + _NUM_CALIBRATIONS):
            starts = (_CALIBRATION_KEYS + ((turn * NUM_ENGINES + number) << 16) for number in range(NUM_ENGINES))
            requests = [Request(0.0, range(start, start + num_blocks), _CALIBRATION_TOKENS) for start in starts]
            found = self.run("round_robin", False, requests)
            answers += found if turn else []  # the first ones also make what an engine makes once
        return median(each.ttft_s for each in answers) / _CALIBRATION_TOKENS, median(each.step_s for each in answers)

    def _engine(self, number: int, with_pool: bool) -> Path:
        """Writes an engine's configuration."""
        address = self._events(number, with_pool)
        name = f"{'pool' if with_pool else 'none'}-{number}"
        config = self._folder / f"{name}.toml"
        config.write_text(
            f'gateway_tenants = ["{self._tenant}"]\n{self._tables()}'
            f'[engine]\nmodel = "{demo_model_path()}"\nlisten = "127.0.0.1:0"\ndtype = "{self._dtype}"\n'
            f"num_threads = 1\nkv_bytes = {KV_BYTES}\nmax_batch_tokens = {BATCH_TOKENS}\n"
            f"[host]\ncapacity_bytes = {HOST_BYTES}\n"
            f"[cache]\ntokens_per_block = {TOKENS_PER_BLOCK}\nio_process = false\n"
            f'[events]\nendpoint = "{address}"\nreplay_endpoint = "{address}-replay"\n'
            f"{self._pool if with_pool else ''}"
        )
        return config

    def _events(self, number: int, with_pool: bool) -> str:
        return f"ipc://{self._folder}/{'pool' if with_pool else 'none'}-{number}"

    def _tables(self) -> str:
        return f'[tenants.{self._tenant}]\nsecret = "env:BENCH_SECRET"\ntoken = "env:BENCH_TOKEN"\n'
