"""vLLM's `LLM` in a process of its own: `python -m kvtier_bench.vllm.engine_child SETTINGS ANSWERS`.

SETTINGS is JSON: `options` of `LLM`, and `packages`, folders whose packages are there beside vLLM's. Commands come as
lines of JSON on standard input, `{"call": NAME, ...arguments}`. Each has one line of JSON as its answer, on the file
descriptor ANSWERS: standard output belongs to vLLM. The first comes by itself when the engine has started. An error is
an answer too, `{"error": TEXT}`, and the last one. The engine ends with its input.
"""

import json
import os
import sys
import time
from random import Random
from typing import Any, TextIO

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.reader import Counter

from kvtier_bench.measuring.workloads import WORKLOADS, Turn

_PATIENCE_S = 60.0
_COMPUTED = "vllm:prompt_tokens_by_source:local_compute"
_OF_ENGINE = frozenset(("model_name", "engine"))
"""Labels that all of an engine's counters have."""


class Driver:
    """The commands. One thread, which is also the engine's: between commands nothing runs but a connector's threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._llm = LLM(**options, disable_log_stats=False)
        core: Any = self._llm.llm_engine.engine_core.engine_core
        self._scheduler: Any = core.scheduler
        # Not by a function that is called in the worker: it may change weights, and kvtier would keep nothing.
        _touch_memory(core.model_executor.driver_worker.worker)

    def facts(self) -> dict[str, Any]:
        return {"vocabulary": self._llm.llm_engine.model_config.get_vocab_size(), "pid": os.getpid()}

    def generate(self, prompts: list[list[int]], max_tokens: int, params: dict[str, Any] | None) -> dict[str, Any]:
        """Greedily, all prompts at once.

        :param params: `kv_transfer_params` of the requests.
        """
        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(requests, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    def serve(self, work: str, seed: int) -> dict[str, Any]:
        """Serves one round of `measuring.workloads` greedily, from an empty prefix cache: the fields of a `Round`."""
        if not self.reset(connector=False):
            raise RuntimeError("vLLM did not empty its prefix cache: blocks are in use without requests")
        engine, workload = self._llm.llm_engine, WORKLOADS[work]
        sampling = SamplingParams(temperature=0, max_tokens=workload.answer_tokens, ignore_eos=True)
        open_turns, began_s, ttft_s = dict[str, Turn](), dict[str, float](), dict[str, float]()
        answers, num_computed = dict[int, list[int]](), 0

        def submit(turn: Turn) -> None:
            request = str(turn.number)
            open_turns[request], began_s[request] = turn, time.perf_counter()
            engine.add_request(request, TokensPrompt(prompt_token_ids=turn.prompt), sampling)

        turns = workload.turns(Random(seed), self._llm.llm_engine.model_config.get_vocab_size())
        start = time.perf_counter()
        for turn in turns:
            submit(turn)
        while open_turns:
            for output in engine.step():
                ttft_s.setdefault(output.request_id, time.perf_counter() - began_s[output.request_id])
                if output.finished:
                    turn = open_turns.pop(output.request_id)
                    answers[turn.number] = [*output.outputs[0].token_ids]
                    num_computed += len(turn.prompt) - (output.num_cached_tokens or 0)
                    for following in turn.follow(answers[turn.number]):
                        submit(following)
        return {
            "seconds": time.perf_counter() - start,
            "ttft_s": [*ttft_s.values()],
            "num_computed": num_computed,
            "answers": [answers[number] for number in sorted(answers)],
        }

    def branch(self, prompt: list[int], num_branches: int, max_tokens: int, seed: int) -> dict[str, float]:
        """Draws so many answers to one prompt, from an empty prefix cache, and counts the blocks that are taken."""
        if not self.reset(connector=False):
            raise RuntimeError("vLLM did not empty its prefix cache: blocks are in use without requests")
        engine, block_pool = self._llm.llm_engine, self._scheduler.kv_cache_manager.block_pool
        sampling = SamplingParams(
            n=num_branches, temperature=1.0, max_tokens=max_tokens, seed=seed, ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        num_free, most, ttft_s, num_ended = block_pool.get_num_free_blocks(), 0, 0.0, 0
        computed_before = self.counters().get(_COMPUTED, 0)
        start = time.perf_counter()
        engine.add_request("0", TokensPrompt(prompt_token_ids=prompt), sampling)
        while num_ended < num_branches:
            for output in engine.step():
                ttft_s = ttft_s or time.perf_counter() - start
                num_ended += sum(each.finish_reason is not None for each in output.outputs)
            most = max(most, num_free - block_pool.get_num_free_blocks())
        return {
            "seconds": time.perf_counter() - start,
            "ttft_s": ttft_s,
            "most_blocks": most,
            "num_computed": self.counters().get(_COMPUTED, 0) - computed_before,
        }

    def settle(self) -> None:
        """Lets the connector end what it does behind requests; a server would, while it idles."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._scheduler.has_requests():
            self._llm.llm_engine.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the connector has had work for {_PATIENCE_S:.0f} s without requests")

    def reset(self, connector: bool) -> bool:
        """Empties vLLM's prefix cache, and with `connector` what that holds. False: blocks are in use."""
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))

    def counters(self) -> dict[str, float]:
        """vLLM's own and the connector's, by `name` or `name:label`."""
        totals: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if isinstance(metric, Counter):
                labels = [value for label, value in sorted(metric.labels.items()) if label not in _OF_ENGINE]
                name = ":".join((metric.name, *labels))
                totals[name] = totals.get(name, 0) + metric.value
        return totals

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _touch_memory(worker: Any) -> None:
    """All of the worker's KV: in an engine that has run for a while, no page of it is new to the system."""
    for layer in worker.model_runner.kv_caches:
        layer.zero_()


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path += settings["packages"]  # behind: where both have a package, vLLM's is taken
    with os.fdopen(int(sys.argv[2]), "w") as answers:
        _serve(settings["options"], answers)


def _serve(options: dict[str, Any], answers: TextIO) -> None:
    def answer(what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        driver = Driver(options)
        answer(driver.facts())
        for line in sys.stdin:
            command = json.loads(line)
            answer(getattr(driver, command.pop("call"))(**command))
        driver.stop()
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
