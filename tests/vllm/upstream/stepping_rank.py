"""A worker for the stepped scheduler: a connector of ours, and arithmetic in the place of a model."""

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from arithmetic_model import ArithmeticModel
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

import kvtier_vllm.worker
from hierarchy_rig import Held
from kvtier.device.kv import DeviceKV, Fence
from kvtier.identity.namespace import Namespace
from kvtier.memory.arena import Arena
from kvtier.memory.slot_memory import SlotMemory
from kvtier_vllm import KvtierConnector

BLOCK = 16


class HeldDevice:
    """Device memory whose copies out wait for `gate`."""

    def __init__(self, inner: DeviceKV, gate: Any) -> None:
        self._inner, self._gate = inner, gate
        self.block_bytes = inner.block_bytes

    def fence(self) -> Fence | None:
        return self._inner.fence()

    def gather(
        self, device_slots: Sequence[int], arena: Arena, arena_slots: Sequence[int], *, after: Fence | None
    ) -> None:
        assert self._gate.wait(20.0)
        self._inner.gather(device_slots, arena, arena_slots, after=after)

    def scatter(
        self, arena: SlotMemory, arena_slots: Sequence[int], device_slots: Sequence[int], *, after: Fence | None
    ) -> float:
        return self._inner.scatter(arena, arena_slots, device_slots, after=after)


class Rank:
    """One worker: connector and model. Calls the connector in vLLM's order."""

    def __init__(self, connector: KVConnectorBase_V1, *, rank: int, num_ranks: int, num_blocks: int) -> None:
        self.connector = connector
        self.model = ArithmeticModel(rank=rank, num_blocks=num_blocks, block_size=BLOCK)
        namespace = Namespace(
            weights_digest=bytes(32), dtype="int64", kv_dtype="int64", physical_layout="arithmetic",
            backend="arithmetic", num_layers=len(self.model.layers), num_kv_heads=1, head_dim=1,
            tp_size=num_ranks, tp_rank=rank,
        )  # fmt: skip
        with (
            mock.patch.object(kvtier_vllm.worker, "get_tp_group", return_value=_group(rank, num_ranks)),
            mock.patch.object(kvtier_vllm.worker, "get_pp_group", return_value=_group(0, 1)),
            # There are no weights and no attention backends, which these two look at.
            mock.patch.object(kvtier_vllm.worker, "namespace_of", return_value=namespace),
            mock.patch.object(kvtier_vllm.worker, "weight_files", return_value=[]),
        ):
            connector.register_kv_caches(self.model.layers)

    @property
    def mover(self) -> Any:
        """The mover of our connector. Tests put faults into it and look at nothing else of it."""
        return ours(self.connector)._worker._mover  # type: ignore[attr-defined]

    def hold_disk(self) -> Held:
        """Its disk tier, to be held up and broken from now on."""
        held = Held(self.mover._tiers.by_name["disk"])
        self.mover._tiers.by_name["disk"] = held
        return held

    def hold_copies_out(self, gate: Any) -> None:
        self.mover._memory.device = HeldDevice(self.mover._memory.device, gate)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = _sent(output.kv_connector_metadata)
        connector = self.connector
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        context: Any = SimpleNamespace(attn_metadata=None)
        if output.has_sync_kv_loads:
            connector.start_load_kv(context)
        result = self.model.run(output)
        if not output.has_sync_kv_loads:
            connector.start_load_kv(context)
        connector.wait_for_save()
        done = connector.get_transfer_results(output.finished_req_ids)
        result.kv_connector_output = KVConnectorOutput(
            finished_sending=done.finished_sending or None,
            finished_recving=done.finished_recving or None,
            failed_recving=done.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=_sent(connector.build_connector_worker_meta()),
        )
        connector.clear_connector_metadata()
        return result


def _sent(message: Any) -> Any:
    """As it comes to another process: vLLM pickles what passes between them. Bytes of our own."""
    return pickle.loads(pickle.dumps(message))  # noqa: S301


def ours(connector: KVConnectorBase_V1) -> KVConnectorBase_V1:
    """The one that is ours, where there are several."""
    children = connector.sub_connectors if isinstance(connector, MultiConnector) else [connector]
    return next((child for child in children if isinstance(child, KvtierConnector)), connector)


def _group(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank_in_group=rank, world_size=size)
