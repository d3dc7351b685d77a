"""All that depends on SGLang's version."""

from typing import Any

import sglang
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool_host import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_context, get_server_args

_REPLICATED = (MLATokenToKVPoolHost, DSAIndexerPoolHost, DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool)
"""Host pools of which all tensor-parallel ranks hold the same, where the model's KV is of that kind."""
_CHANGES_WEIGHTS = frozenset(("model_runner.update_model_fields", "scheduler.weight_version"))
"""What SGLang notes beside its options when it has taken other weights from disk, or been told that they are others."""


def version() -> str:
    """SGLang's."""
    return str(sglang.__version__)


def option(name: str) -> Any | None:
    """An option of the server, as it came out of what the user said; None where no server is."""
    try:
        args = get_server_args()
    except ValueError:
        return None
    return resolution_result(args, name)


def num_notes() -> int:
    """How many changes of its options SGLang has noted since the server started."""
    return len(get_context()._overrides_log)


def have_weights_changed(since: int) -> bool:
    """Whether one of the notes from this one on is of other weights.

    SGLang notes weights from disk, and all that come with a new `weight_version`. Its notes are of other options, too,
    some that speculative decoding changes all the time: its own `overrides_log` would copy all of them.
    """
    return any(source in _CHANGES_WEIGHTS for source, _ in get_context()._overrides_log[since:])


def holds_no_bytes(host_pool: Any) -> bool:
    """Whether a host pool hands out indices alone, and others hold the bytes."""
    return isinstance(host_pool, LogicalHostPool)


def is_written_by_all(pool_name: str) -> bool:
    """Whether every tensor-parallel rank writes this pool's pages also where latent attention is written by the first.

    SGLang's `should_backup` has it so of states alone, for backends that it loads by name.
    """
    return pool_name == str(PoolName.MAMBA)


def is_replicated(host_pool: Any, *, is_mla_model: bool) -> bool:
    """Whether all tensor-parallel ranks hold the same in it, so that one of them writes for all.

    Only what is known to be so: a rank that took another's share of the heads for its own would be wrong, one that
    finds nothing is slow.
    """
    return is_mla_model and isinstance(host_pool, _REPLICATED)
