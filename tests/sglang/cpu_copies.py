"""Copies between SGLang's device pools and its host pools, which it makes with GPU kernels, in torch on the CPU.

Nothing else of SGLang is replaced: trees, controllers, host pools and their layouts are its own.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import not_reached  # noqa: F401  (before SGLang)
import torch
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.test.kits.unified_radix_cache import fixtures

_IN_TORCH = "kernel_ascend"
"""The way of copying states that SGLang has in torch itself."""
_NOT_PINNED = property(lambda _pool: False, lambda _pool, _asked: None)
"""Pinning needs a GPU's driver."""


def _tokens(host: MHATokenToKVPoolHost, layer: int, indices: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """A view of one layer with keys and values first, and where in it `indices` are. By SGLang's names of layouts:

    `layer_first` is [2, layers, tokens, heads, dim], `page_first` [2, tokens, layers, heads, dim], `page_first_direct`
    [2, pages, layers, tokens of a page, heads, dim], `page_head` [2, pages, heads, tokens of a page, layers, dim].
    """
    whole = slice(None)
    pages, offsets = indices // host.page_size, indices % host.page_size
    match host.layout:
        case "layer_first":
            return host.kv_buffer[:, layer], (whole, indices)
        case "page_first":
            return host.kv_buffer[:, :, layer], (whole, indices)
        case "page_first_direct":
            return host.kv_buffer[:, :, layer], (whole, pages, offsets)
        case "page_head":
            return host.kv_buffer[:, :, :, :, layer].transpose(2, 3), (whole, pages, offsets)
        case other:
            raise ValueError(f"no copy for the layout {other!r}")


def _load(
    host: MHATokenToKVPoolHost,
    _pool: object,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer: int,
    _backend: str,
    **_: object,
) -> None:
    view, where = _tokens(host, layer, host_indices)
    host.device_k_buffers[layer][device_indices], host.device_v_buffers[layer][device_indices] = view[where]


def _back_up(
    host: MHATokenToKVPoolHost,
    _pool: object,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    _backend: str,
) -> None:
    for layer in range(host.layer_num):
        view, where = _tokens(host, layer, host_indices)
        on_device = host.device_k_buffers[layer], host.device_v_buffers[layer]
        view[where] = torch.stack([buffer[device_indices] for buffer in on_device])


def _latent(host: MLATokenToKVPoolHost, layer: int, indices: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """The same of latent attention, which has one tensor in the place of keys and values."""
    match host.layout:
        case "layer_first":
            return host.kv_buffer[layer], (indices,)
        case "page_first":
            return host.kv_buffer[:, layer], (indices,)
        case "page_first_direct":
            return host.kv_buffer[:, layer], (indices // host.page_size, indices % host.page_size)
        case other:
            raise ValueError(f"no copy for the layout {other!r}")


def _load_latent(
    host: MLATokenToKVPoolHost,
    _pool: object,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer: int,
    _backend: str,
    **_: object,
) -> None:
    view, where = _latent(host, layer, host_indices)
    host.device_kv_buffers[layer][device_indices] = view[where]


def _back_up_latent(
    host: MLATokenToKVPoolHost,
    _pool: object,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    _backend: str,
) -> None:
    for layer in range(host.layer_num):
        view, where = _latent(host, layer, host_indices)
        view[where] = host.device_kv_buffers[layer][device_indices]


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """While it lasts, pools of all trees of this process copy so."""
    load_states = MambaPoolHost.load_to_device_per_layer
    back_up_states = MambaPoolHost.backup_from_device_all_layer

    def load_states_in_torch(self: MambaPoolHost, *arguments: Any, **how: Any) -> None:
        load_states(self, *arguments[:4], _IN_TORCH, **how)

    def back_up_states_in_torch(self: MambaPoolHost, *arguments: Any) -> None:
        back_up_states(self, *arguments[:3], _IN_TORCH)

    with (
        mock.patch.object(MHATokenToKVPoolHost, "load_to_device_per_layer", _load),
        mock.patch.object(MHATokenToKVPoolHost, "backup_from_device_all_layer", _back_up),
        mock.patch.object(MLATokenToKVPoolHost, "load_to_device_per_layer", _load_latent),
        mock.patch.object(MLATokenToKVPoolHost, "backup_from_device_all_layer", _back_up_latent),
        mock.patch.object(MambaPoolHost, "load_to_device_per_layer", load_states_in_torch),
        mock.patch.object(MambaPoolHost, "backup_from_device_all_layer", back_up_states_in_torch),
        mock.patch.object(fixtures, "get_device", return_value="cpu"),
        mock.patch.object(HostKVCache, "pin_memory", _NOT_PINNED, create=True),
    ):
        yield
