"""vLLM's `LLM`, one after the other, as `engine_lab` has it do.

Commands come as lines of JSON on standard input, `{"call": NAME, ...arguments}`; each has one line of JSON as its
answer, on a file descriptor: standard output belongs to vLLM. The first is `start`; another one may follow
`stop`, since importing vLLM takes longer than starting an engine. An error is an answer too, `{"error": TEXT}`, and the
last one. The process ends with its input.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import weights_by_wire
from PIL import Image
from safetensors.torch import load_file
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig, WeightTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.core_client import MPClient
from vllm.v1.metrics.reader import Counter

from kvtier.offload.messages import Loaded, decode


class Driver:
    """The commands."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._adapters: dict[str, int] = {}
        self._noted: list[Any] = []

    def start(
        self, options: dict[str, Any], transfer: dict[str, Any] | None, processes: bool, async_scheduling: bool
    ) -> dict[str, Any]:
        """Gives what there is to know of the engine."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
        if "kv_events_config" in options:
            options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
        if "weight_transfer_config" in options:
            weights_by_wire.register()
            options["weight_transfer_config"] = WeightTransferConfig(**options["weight_transfer_config"])
        with scheduled_asynchronously() if async_scheduling else nullcontext():
            llm = LLM(kv_transfer_config=KVTransferConfig(**transfer) if transfer is not None else None, **options)
        self._llm = llm
        assert isinstance(llm.llm_engine.engine_core, MPClient) == processes, "vLLM goes by an earlier engine's setting"
        return {"async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling}

    def start_beside(self, options: dict[str, Any]) -> str:
        """Why another engine in this process, without a connector, does not start; empty if it does."""
        try:
            LLM(**options)
        except Exception as error:
            return str(error)
        return ""

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str | None,
        adapter: str | list[Any] | None,
        params: dict[str, Any] | None,
        pictures: list[list[Any]],
    ) -> list[dict[str, Any]]:
        """Greedily, all prompts at once.

        :param adapter: a folder, which has an id and a name for as long as the engine lives; or name, id and folder.
        """
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        salted: Any = {"cache_salt": salt} if salt is not None else {}
        requests = [
            TokensPrompt(prompt_token_ids=prompt, **salted, **_seen(seen))
            for prompt, seen in zip_longest(prompts, pictures)
        ]
        outputs = self._running.generate(requests, sampling, lora_request=self._lora(adapter), use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "num_cached": output.num_cached_tokens,
                "params": output.kv_transfer_params,
            }
            for output in outputs
        ]

    def _lora(self, adapter: str | list[Any] | None) -> LoRARequest | None:
        if isinstance(adapter, str):
            number = self._adapters.setdefault(adapter, len(self._adapters) + 1)
            return LoRARequest(f"adapter-{number}", number, adapter)
        return None if adapter is None else LoRARequest(*adapter)

    def reset(self, connector: bool) -> bool:
        return self._running.reset_prefix_cache(reset_connector=connector)

    def call_workers(self, method: str, arguments: dict[str, Any]) -> None:
        """As a client of vLLM does that changes weights: `collective_rpc`."""
        self._running.collective_rpc(method, kwargs=arguments)

    def load_past_vllm(self, path: str, weight: str) -> None:
        """As training frameworks do that live in the engine's process: one weight, right into the model."""
        content = load_file(Path(path) / "model.safetensors")[weight]
        self._running.apply_model(lambda model: len(model.load_weights([(weight, content)])))

    def sleep(self, level: int) -> None:
        self._running.sleep(level)

    def wake_up(self) -> None:
        self._running.wake_up()

    def load_adapter(self, adapter: str, path: str) -> None:
        """In place of one that may be in use, from this folder, as vLLM's server does. Both folders mean it then."""
        number = self._adapters[path] = self._adapters.setdefault(adapter, len(self._adapters) + 1)
        self._running.llm_engine.add_lora(LoRARequest(f"adapter-{number}", number, path, load_inplace=True))

    def counters(self) -> dict[str, int]:
        """vLLM's own, summed over their labels."""
        totals: dict[str, int] = {}
        for metric in self._running.get_metrics():
            if isinstance(metric, Counter):
                totals[metric.name] = totals.get(metric.name, 0) + metric.value
        return totals

    def is_idle(self) -> bool:
        """Whether its connector has nothing left to do. For an engine in this process."""
        return not self._scheduler.connector.has_pending_push_work()

    def note_steps(self) -> None:
        """From now on, notes what `noted` gives. For an engine in this process."""
        noted, scheduler = self._noted, self._scheduler
        plan, take_in = scheduler.schedule, scheduler.connector.update_connector_output

        def schedule(*arguments: Any) -> Any:
            output = plan(*arguments)
            noted.append(sorted(output.num_scheduled_tokens))
            return output

        def update_connector_output(results: Any) -> None:
            metadata = results.kv_connector_worker_meta
            told = metadata.messages.values() if metadata is not None else ()
            noted.extend("loaded" for messages in told for each in messages if isinstance(decode(each), Loaded))
            take_in(results)

        scheduler.schedule = schedule
        scheduler.connector.update_connector_output = update_connector_output

    def noted(self) -> list[Any]:
        """What happened since the last call, in order: ids that a step schedules, or `loaded`, by a worker's answer."""
        noted = list(self._noted)
        self._noted.clear()
        return noted

    @property
    def _scheduler(self) -> Any:
        core: Any = self._running.llm_engine.engine_core
        return core.engine_core.scheduler

    def stop(self) -> None:
        """In good order: what was saved is stored."""
        self._running.llm_engine.engine_core.shutdown()
        self._llm = None
        self._adapters.clear()
        gc.collect()
        cleanup_dist_env_and_memory()

    @property
    def _running(self) -> LLM:
        assert self._llm is not None, "no engine was started"
        return self._llm


def _seen(pictures: list[Any] | None) -> Any:
    """Parts of a prompt: pictures as seed, width, height and name."""
    if not pictures:
        return {}
    images = []
    for seed, width, height, _ in pictures:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        images.append(Image.fromarray(pixels if seed else np.full_like(pixels, 99)))
    return {"multi_modal_data": {"image": images}, "multi_modal_uuids": {"image": [name for *_, name in pictures]}}


@contextmanager
def scheduled_asynchronously() -> Iterator[None]:
    """Engines that are started meanwhile. vLLM turns it off on the CPU; its engine core can do it nevertheless."""
    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_turn_on(platform: type[CpuPlatform], config: VllmConfig) -> None:
        check(platform, config)
        config.scheduler_config.async_scheduling = True

    with mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(check_and_turn_on)):
        yield


def main() -> None:
    driver = Driver()
    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def answer(what: Any) -> None:
            print(json.dumps(what), file=answers, flush=True)

        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer(getattr(driver, command.pop("call"))(**command))
            except Exception as error:
                answer({"error": f"{type(error).__name__}: {error}"})
                raise
