"""Waiting, on a stream, until one layer of a copy that is still under way on another stream is there.

A copy with `counters` makes parts complete one after the other. An engine's stream waits for the first layer, computes
it while the others are on their way, waits for the next one, and so on. Ours does not: decision 17 in `docs/adr`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtier_kernels.arguments import check_counters
from kvtier_kernels.launching import check_launchable, on_device_of

DEFAULT_MAX_POLLS = 2**22
"""Each takes about a microsecond: some seconds."""


def wait_for_layer(
    counters: Tensor, layer: int, expected: int, missed: Tensor, *, max_polls: int = DEFAULT_MAX_POLLS
) -> None:
    """What the current stream does next sees the whole of this layer.

    The host does not wait: a program of one warp polls. Launch the copy first, on another stream, else the wait cannot
    end well. It ends in any case: after `max_polls` it adds 1 to `missed`, and what follows sees a layer that is not
    complete. So look at `missed` before anything is made of the results, e.g. together with the sampled tokens.

    :param counters: int32 `[num_layers]`, as given to the copy. `layer`: a place in it.
    :param expected: what the copy has returned.
    :param missed: int32 `[1]` on the same device, zeroed by the caller.
    :raises ValueError: on a wrong shape, dtype, stride or device, or a layer that does not exist.
    """
    check_launchable("counters", counters, _wait_kernel)
    check_counters(counters, counters.numel(), counters.device)
    if not 0 <= layer < counters.numel():
        raise ValueError(f"layer {layer}: there are {counters.numel()} counters")
    if missed.shape != (1,) or missed.dtype != torch.int32 or missed.device != counters.device:
        raise ValueError(f"missed is {list(missed.shape)} {missed.dtype} on {missed.device}: needs int32 [1] there")
    with on_device_of(counters):
        _wait_kernel[(1,)](counters, layer, expected, missed, max_polls, num_warps=1)


@triton.jit(do_not_specialize=["layer", "expected", "max_polls"])
def _wait_kernel(counters, layer, expected, missed, max_polls):
    # Adding 0 is the load that acquires: a plain one may be served from a cache.
    seen = tl.atomic_add(counters + layer, 0, sem="acquire", scope="gpu")
    polls = 0
    while (seen < expected) & (polls < max_polls):
        seen = tl.atomic_add(counters + layer, 0, sem="acquire", scope="gpu")
        polls += 1
    if seen < expected:
        tl.atomic_add(missed, 1)
