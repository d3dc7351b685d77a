"""What a request's client says to kvtier: the table `kvtier` in its `kv_transfer_params`, and what it hears back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request

_TABLE = "kvtier"
_PIN_S = 3600.0
"""The seconds of a pin for which the request gives no time."""
_MAX_PIN_S = 1e9
_KNOWN = ("no_store", "pin", "ttl_s", "tenant")


@dataclass(frozen=True, slots=True)
class RequestParams:
    """Checked, but for `tenant`: what cannot be used is in `ignored`, and the request goes on without it."""

    is_asked: bool
    """There is such a table: its client wants an answer."""
    no_store: bool
    """Nothing of the request is saved."""
    pin_s: float
    """Seconds for which the pool is to keep the prompt's blocks in memory; 0: it keeps them like any others."""
    tenant: object
    """Name of the tenant that it says it is of; None: nothing."""
    ignored: Mapping[str, str]
    """Why a parameter is ignored, by its name."""


def params_of(
    request: Request, *, has_pool: bool, may_be: Callable[[object], bool] = lambda tenant: True
) -> RequestParams:
    """What the request says, whatever it is.

    :param has_pool: where blocks can be pinned.
    :param may_be: says whether a request may name this tenant.
    """
    params: object = request.kv_transfer_params
    table = params.get(_TABLE) if isinstance(params, Mapping) else None
    if not isinstance(table, Mapping):
        ignored = {} if table is None else {_TABLE: "must be a table"}
        return RequestParams(table is not None, False, 0.0, None, ignored)
    ignored = {str(name): f"is not known; there are {', '.join(_KNOWN)}" for name in table if name not in _KNOWN}
    if "priority" in ignored:
        ignored["priority"] = "kvtier evicts by use: `pin` what must stay, `no_store` what will not come again"
    flags = {name: table.get(name, False) for name in ("no_store", "pin")}
    ignored |= {name: "must be true or false" for name, value in flags.items() if not isinstance(value, bool)}
    ttl_s = table.get("ttl_s", _PIN_S)
    if not _is_time(ttl_s):
        ignored["ttl_s"] = "must be seconds above 0"
    elif "ttl_s" in table and flags["pin"] is not True:
        ignored["ttl_s"] = "is the time of a `pin`; there is none"
    if flags["pin"] is True and not has_pool:
        ignored["pin"] = "this engine has no pool"
    pins = flags["pin"] is True and _is_time(ttl_s) and has_pool
    tenant = table.get("tenant")
    if tenant is not None and not may_be(tenant):
        named = repr(tenant[:100]) if isinstance(tenant, str) else f"a value of type {type(tenant).__name__}"
        ignored["tenant"] = f"{named} is no tenant of this engine, so the request uses no cache"
    # A request that asks badly not to be stored is not stored.
    return RequestParams(True, bool(flags["no_store"]), float(ttl_s) if pins else 0.0, tenant, ignored)


def answer_to(params: RequestParams, loaded_blocks: Mapping[str, int]) -> dict[str, Any] | None:
    """What the request's answer says of kvtier in its `kv_transfer_params`; None if the request did not ask."""
    if not params.is_asked:
        return None
    told: dict[str, Any] = {"loaded_blocks": dict(loaded_blocks)}
    if params.ignored:
        told["ignored"] = dict(params.ignored)
    return {_TABLE: told}


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MAX_PIN_S
