"""vLLM's `LLM` in a process of its own: `engine_child.py SETTINGS ANSWERS`, started by `vllm_rig` alone.

SETTINGS is JSON. Commands come as lines of JSON on standard input, `{"call": NAME, ...arguments}`; each has one line of
JSON as its answer, on the file descriptor ANSWERS: standard output belongs to vLLM. The first answer comes by itself
when the engine has started. `restart` puts another engine in its place: importing vLLM takes longer than starting
one. An error is an answer too, `{"error": TEXT}`. The engine ends with the input.
"""

import gc
import json
import os
import sys
from itertools import zip_longest
from typing import Any

import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.metrics.reader import Counter


class Driver:
    """The commands."""

    def __init__(self, options: dict[str, Any], transfer: dict[str, Any] | None) -> None:
        self._start(options, transfer)

    def _start(self, options: dict[str, Any], transfer: dict[str, Any] | None) -> None:
        if "kv_events_config" in options:
            options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
        self._llm = LLM(kv_transfer_config=KVTransferConfig(**transfer) if transfer is not None else None, **options)
        self._adapters: dict[str, int] = {}

    def started(self) -> dict[str, Any]:
        return {"async_scheduling": self._llm.llm_engine.vllm_config.scheduler_config.async_scheduling}

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        salt: str | None,
        adapter: str | None,
        params: dict[str, Any] | None,
        pictures: list[list[Any]],
    ) -> list[dict[str, Any]]:
        """Greedily, all prompts at once. An adapter is a folder; each has an id for as long as the engine lives."""
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        salted: Any = {"cache_salt": salt} if salt is not None else {}
        requests = [
            TokensPrompt(prompt_token_ids=prompt, **salted, **_seen(seen))
            for prompt, seen in zip_longest(prompts, pictures)
        ]
        lora = None
        if adapter is not None:
            number = self._adapters.setdefault(adapter, len(self._adapters) + 1)
            lora = LoRARequest(f"adapter-{number}", number, adapter)
        outputs = self._llm.generate(requests, sampling, lora_request=lora, use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "num_cached": output.num_cached_tokens,
                "params": output.kv_transfer_params,
            }
            for output in outputs
        ]

    def reset(self, connector: bool) -> bool:
        return self._llm.reset_prefix_cache(reset_connector=connector)

    def counters(self) -> dict[str, int]:
        """vLLM's own, summed over their labels."""
        totals: dict[str, int] = {}
        for metric in self._llm.get_metrics():
            if isinstance(metric, Counter):
                totals[metric.name] = totals.get(metric.name, 0) + metric.value
        return totals

    def restart(self, options: dict[str, Any], transfer: dict[str, Any] | None) -> dict[str, Any]:
        """Another engine, after the end of this one."""
        self.stop()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()
        self._start(options, transfer)
        return self.started()

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _seen(pictures: list[Any] | None) -> Any:
    """Parts of a prompt: pictures as seed, width, height and name."""
    if not pictures:
        return {}
    images = []
    for seed, width, height, _ in pictures:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        images.append(Image.fromarray(pixels if seed else np.full_like(pixels, 99)))
    return {"multi_modal_data": {"image": images}, "multi_modal_uuids": {"image": [name for *_, name in pictures]}}


def schedule_asynchronously() -> None:
    """vLLM turns asynchronous scheduling off on the CPU; its engine core can do it nevertheless."""
    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_turn_on(platform: type[CpuPlatform], config: VllmConfig) -> None:
        check(platform, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_turn_on)  # type: ignore[assignment]


def main() -> None:
    settings = json.loads(sys.argv[1])
    with os.fdopen(int(sys.argv[2]), "w") as answers:

        def answer(what: Any) -> None:
            print(json.dumps(what), file=answers, flush=True)

        if settings["async_scheduling"]:
            schedule_asynchronously()
        try:
            driver = Driver(settings["options"], settings["transfer"])
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise
        answer(driver.started())
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer(getattr(driver, command.pop("call"))(**command))
            except Exception as error:
                answer({"error": f"{type(error).__name__}: {error}"})
                raise
        driver.stop()


if __name__ == "__main__":
    main()
