"""What tests ask of vLLM engines: prompts, the answers that they expect, and settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cache_pool import TOKENS, WAIT_S

BLOCK = 32
"""Tokens of a block; vLLM on the CPU wants multiples of 32."""
NUM_TOKENS = 40
"""Generated per request: enough to fill a block."""
CROWD_TOKENS = 120
"""Generated per request of the crowd: then it needs more than 30 blocks, into which its prompts fit."""
VOCABULARY = 2000
PATIENT_POOL = {"connect_timeout_s": 30.0, "call_timeout_s": 30.0}
PATIENT_CACHE = {"lookup_deadline_s": WAIT_S, "load_deadline_s": WAIT_S}
"""Deadlines that no machine is too slow for: what misses them, an engine computes, and no test would see why."""
ENVIRON = {
    "TORCH_COMPILE_DISABLE": "1",  # of helpers that vLLM compiles in eager mode too, 3 s at every engine's first step
    "OMP_NUM_THREADS": "1",  # where cores are shared, threads that wait for each other in a loop take for ever
    "NUMBA_NUM_THREADS": "1",  # or it tells OpenMP to take one for each core
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or vLLM does, for workers in processes of their own
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "KV_SECRET": "a secret of more than sixteen bytes",
    **{f"{name.upper()}_TOKEN": token for name, token in TOKENS.items()},
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an engine to one prompt."""

    tokens: list[int]
    num_cached: int
    """Tokens of the prompt that were not computed."""
    params: Mapping[str, Any] | None = None
    """What the connector says with it."""


class Adapter(NamedTuple):
    """A LoRA adapter as a request names it."""

    name: str
    number: int
    """vLLM keeps what it has loaded by this."""
    path: str


class Picture(NamedTuple):
    """An image of random pixels."""

    seed: int
    """0: all pixels are the same."""
    width: int
    """In pixels, as is the height."""
    height: int
    name: str | None = None
    """What its client calls it (`uuid`)."""


def make_prompts(count: int = 4, *, first_length: int = 300, seed: int = 0) -> list[list[int]]:
    """No two share their first token. Lengths grow by 10: some are whole blocks, most are not."""
    return [
        [(7 * i * i + 3 * i + number + 100 * seed) % VOCABULARY + 3 for i in range(first_length + 10 * number)]
        for number in range(count)
    ]


def make_crowd() -> list[list[int]]:
    return make_prompts(8, first_length=70)


def continued(prompts: Sequence[Sequence[int]], answers: Sequence[Answer], num_tokens: int) -> list[list[int]]:
    """Prompts that go on with what was answered to them."""
    return [[*prompt, *answer.tokens[:num_tokens]] for prompt, answer in zip(prompts, answers, strict=True)]


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def cached_of(answers: Sequence[Answer]) -> list[int]:
    return [answer.num_cached for answer in answers]


def all_hit(prompts: Sequence[Sequence[int]], *, block_size: int = BLOCK) -> list[int]:
    """Tokens of each prompt that a full hit spares: whole blocks, but never the last token."""
    return [(len(prompt) - 1) // block_size * block_size for prompt in prompts]


def none_hit(prompts: Sequence[Sequence[int]]) -> list[int]:
    return [0] * len(prompts)


def num_blocks(prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS, *, block_size: int = BLOCK) -> int:
    """Blocks that are full when so many tokens were generated to each. The last one's KV is never made."""
    return sum((len(prompt) + num_tokens - 1) // block_size for prompt in prompts)


def settings(tenant: str | None = "red", *, gateway: Sequence[str] = (), **tables: Any) -> dict[str, Any]:
    """What users give as `kv_connector_extra_config`. All tenants share a secret: only their names part them.

    :param gateway: tenants that requests may name.
    :param tables: deadlines that they do not set are `PATIENT_POOL` and `PATIENT_CACHE`.
    """
    names = [*([tenant] if tenant is not None else []), *gateway]
    tenants = {name: {"secret": "env:KV_SECRET", "token": f"env:{name.upper()}_TOKEN"} for name in names}
    named = {"tenant": tenant} if tenant is not None else {}
    allowed = {"gateway_tenants": list(gateway)} if gateway else {}
    # With a model this small, computing may be faster than fetching.
    cache = {"fetch": "always", **PATIENT_CACHE, **tables.pop("cache", {})}
    if "pool" in tables:
        tables["pool"] = {**PATIENT_POOL, **tables["pool"]}
    return {**named, **allowed, "tenants": tenants, "host": {"capacity_bytes": "64MiB"}, "cache": cache, **tables}


def transfer(extra: Mapping[str, Any], *, policy: str | None = "recompute") -> dict[str, Any]:
    """What users give as `--kv-transfer-config`."""
    whole: dict[str, Any] = {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier_vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra),
    }
    return whole if policy is None else whole | {"kv_load_failure_policy": policy}
