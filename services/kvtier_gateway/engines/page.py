"""What an engine's `/metrics` says of its load and of its keys: vLLM's, SGLang's and kvtier's own."""

import re
from collections.abc import Mapping

from kvtier.identity.keys import MAX_TOKENS_PER_BLOCK, NAMESPACE_ID_BYTES, NamespaceId
from kvtier_gateway.engines.engine import KeyForm, Loads

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "kvtier_engine_running")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "kvtier_engine_waiting")
_KV_USED = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
_SAMPLE = re.compile(
    rb"^(%s)(?:\{[^\n]*\})? ([0-9.eE+-]+)" % b"|".join(map(str.encode, (*_RUNNING, *_WAITING, *_KV_USED))), re.MULTILINE
)
_KEYS = re.compile(rb"^(?:vllm:)?kvtier_namespace_info\{([^\n]*)\} 1", re.MULTILINE)
_KVTIER = re.compile(rb"^(?:vllm:kvtier_build_info|kvtier_engine_running)[{ ]", re.MULTILINE)
"""What vLLM has from its start on where kvtier is its connector, and kvtier's own engine always."""
_VLLM = re.compile(rb"^vllm:", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def loads_in(page: bytes) -> Loads:
    """Reads what there is: sums over all series, of use the mean. About 1 ms per MB."""
    sums: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(page):
        sums.setdefault(name.decode(), []).append(float(value))
    used = [value for name in _KV_USED for value in sums.get(name, ())]
    return Loads(
        num_running=sum(value for name in _RUNNING for value in sums.get(name, ())),
        num_waiting=sum(value for name in _WAITING for value in sums.get(name, ())),
        kv_used=sum(used) / len(used) if used else 0.0,
    )


def takes_tenants(page: bytes) -> bool:
    """Whether the engine runs what keeps the tenants apart whom a gateway names: vLLM's connector, or kvtier's own
    engine. Neither SGLang nor kvtier below vLLM's own offloading takes a tenant's name from a request."""
    return _KVTIER.search(page) is not None


def is_vllm(page: bytes) -> bool:
    """Whether the engine is vLLM, with or without kvtier."""
    return _VLLM.search(page) is not None


def key_form_in(page: bytes) -> KeyForm | None:
    """How the engine makes keys; None where it does not say so, or says what nobody could follow."""
    found: list[Mapping[str, str]] = [dict(_LABEL.findall(labels.decode())) for labels in _KEYS.findall(page)]
    try:
        namespaces = frozenset(NamespaceId(bytes.fromhex(labels["namespace"])) for labels in found)
        sizes = {int(labels["tokens_per_block"]) for labels in found}
    except (KeyError, ValueError):
        return None
    if len(sizes) != 1 or any(len(namespace) != NAMESPACE_ID_BYTES for namespace in namespaces):
        return None
    size = sizes.pop()
    return KeyForm(size, namespaces) if 1 <= size <= MAX_TOKENS_PER_BLOCK else None
