"""What a step does to paged KV in every layer of a model: checked in the first layer, only launched in the others."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvtier_kernels.arguments import FLOAT_DTYPES, check_write
from kvtier_kernels.attention.attention_batch import AttentionBatch
from kvtier_kernels.attention.attention_cpu import plan_on_cpu
from kvtier_kernels.attention.paged_attention import AttentionPlan, plan_with_triton
from kvtier_kernels.tiles import decode_runs_of_any_length
from kvtier_kernels.writes.kv_write import kv_write, put_on_cpu

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, dtype and device."""
LayerAttention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes `kv_layer`, `query`, `key` and `value` of one layer: writes keys and values (`kv_write`), and returns the
attention of the queries over all keys (`paged_attention`)."""
_MakePlan = Callable[[Tensor, Tensor], AttentionPlan]
_Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def step_attention(places: tuple[Tensor, Tensor], batch: AttentionBatch) -> LayerAttention:
    """`kv_write` and `paged_attention` for one step, to be called for each layer in turn. One thread.

    The first call checks its arguments and chooses how attention is computed. Later calls must bring the same shapes,
    strides, dtypes and devices; comparing these takes the host a third of the time on CUDA, launches aside
    (`python -m kvtier_bench.gpu.resources.launch_costs`).

    :param places: `block_ids` and `offsets` as `kv_write` takes them.
    :returns: for KV that is not quantised, whose scales would differ by layer; raises `ValueError` on arguments that
        are not as they should be, or, after the first layer, not as they were.
    """
    if batch.block_tables.device.type != "cpu":
        return step_with_triton(places, batch)

    def plan(query: Tensor, kv_layer: Tensor) -> AttentionPlan:
        batch.check(query, kv_layer, None, None)
        return plan_on_cpu(query, kv_layer, batch)

    return PlannedStep(places, plan, kv_write, put_on_cpu)


def step_with_triton(places: tuple[Tensor, Tensor], batch: AttentionBatch) -> LayerAttention:
    """`step_attention` through the Triton kernels."""
    return _triton_step(places, lambda query, kv_layer: plan_with_triton(query, kv_layer, batch))


def decode_attention(places: tuple[Tensor, Tensor], batch: AttentionBatch) -> LayerAttention:
    """`step_with_triton` for sequences with one query each, computed in the same way whatever their lengths are.

    For CUDA graphs, whose replays read other values in the same tensors. A sequence of length 0 reads no block, and is
    written to none where its place is (-1, 0).
    """
    if batch.invariant:  # how it is computed follows from nothing but the shapes of one query
        return step_with_triton(places, batch)

    def plan(query: Tensor, kv_layer: Tensor) -> AttentionPlan:
        from kvtier_kernels.attention.paged_decode import plan_decode
        from kvtier_kernels.launching import num_multiprocessors

        max_keys, chip_size = batch.block_tables.size(1) * kv_layer.size(2), num_multiprocessors(query.device)
        num_splits, run_keys = decode_runs_of_any_length(query.size(0), kv_layer.size(3), max_keys, chip_size)
        return plan_decode(query, kv_layer, batch, num_splits=num_splits, run_keys=run_keys)

    return _triton_step(places, plan)


def _triton_step(places: tuple[Tensor, Tensor], plan: _MakePlan) -> "PlannedStep":
    from kvtier_kernels.writes.slot_write import launch_write, write_slots

    return PlannedStep(places, plan, write_slots, launch_write)


class PlannedStep:
    """A `LayerAttention` that computes what a plan says. One thread."""

    def __init__(self, places: tuple[Tensor, Tensor], plan: _MakePlan, first_write: _Write, write: _Write) -> None:
        """
        :param places: of new keys and values: `block_ids` and `offsets`.
        :param plan: checks `query` and `kv_layer` of the first layer, and says how the attention of all is computed.
        :param first_write: writes keys and values of the first layer, as `kv_write` does; `write`, of the others.
        """
        self._places = places
        self._make_plan = plan
        self._first_write = first_write
        self._write = write
        self._plan: AttentionPlan | None = None
        """None before the first layer."""
        self._forms: tuple[_Form, ...] = ()
        """The forms of the first layer's arguments."""

    def __call__(self, kv_layer: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        forms = _form(kv_layer), _form(query), _form(key), _form(value)
        if self._plan is None:
            return self._first(forms, kv_layer, query, key, value)
        if forms != self._forms:
            raise ValueError(_difference(forms, self._forms))
        self._write(kv_layer, key, value, *self._places)
        return self._plan.run(query, kv_layer)

    def _first(self, forms: tuple[_Form, ...], kv_layer: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if kv_layer.dtype not in FLOAT_DTYPES:
            raise ValueError(f"kv_layer is of {kv_layer.dtype}: quantised KV takes paged_attention")
        check_write(kv_layer, key, value, *self._places)
        plan = self._make_plan(query, kv_layer)
        self._first_write(kv_layer, key, value, *self._places)
        self._forms, self._plan = forms, plan
        return plan.run(query, kv_layer)


def _form(tensor: Tensor) -> _Form:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _difference(forms: tuple[_Form, ...], first: tuple[_Form, ...]) -> str:
    """Says how the first argument differs that is of another form than in the first layer."""
    named = zip(("kv_layer", "query", "key", "value"), forms, first, strict=True)
    name, form, before = next(each for each in named if each[1] != each[2])
    return f"{name} is {list(form[0])}, {form[1:]}, in the first layer {list(before[0])}, {before[1:]}: must be equal"
