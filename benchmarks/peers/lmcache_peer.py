"""LMCache's server through shared memory, by what an engine's client may look like.

`client` is what engines call: LOOKUP, which takes the locks that a retrieve needs, then LMCache's transfer context,
which gathers from paged KV and scatters into it: 32 layers of keys and values, 16 tokens a page, as of a model of
8 billion parameters when a block has 2 MiB. `one-page` is the same with a single page per block, the layout it has
least work with. `slots` leaves out LOOKUP and paged KV: prepare, a plain copy between memory and each slot, commit.
"""

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

# Before its modules read them, and for its server, which inherits them.
os.environ |= {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
os.environ["LMCACHE_LOG_LEVEL"] = "WARNING"

import torch
from lmcache.v1.gpu_connector.utils import LayoutHints
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.base import RequestClient
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from peer import Blocks, Bytes, free_port, listens, main, server, wait_for

_CHUNK_TOKENS = 16
"""Tokens in a block. The server hashes them, so few of them favour it."""
_NUM_LAYERS = 32
_HEAD_DIM = 128
_CALLS = ("client", "one-page", "slots")
_TIMEOUT_S = 30.0
_ROOM = 4
"""Memory of the server, in rounds."""
_PagedKv = dict[str, torch.Tensor]


class Worker:
    """One registration with the server: a model's KV, and the memory it lies in."""

    def __init__(self, instance: int, client: RequestClient, sources: _PagedKv, into: _PagedKv) -> None:
        self.instance, self.model = instance, f"bench-{instance}"
        self.sources, self.into = sources, into
        self.transfer = EngineDrivenTransferContext(instance, client)
        layers = tuple(range(len(sources)))
        groups = [EngineGroupInfo(engine_group_id=0, layer_indices=layers, tokens_per_block=_CHUNK_TOKENS)]
        hints: LayoutHints = {"kv_layout": "NHD"}
        self.transfer.register(into, self.model, 1, 1, _TIMEOUT_S, layout_hints=hints, engine_group_infos=groups)

    def retrieve(self, key: IPCCacheServerKey, slots: range) -> None:
        """What engines call."""
        done = self.transfer.submit_retrieve(key.request_id, key, self.into, [list(slots)], None, 1)
        if not done.result(timeout=_TIMEOUT_S):
            raise RuntimeError("a retrieve missed")

    def store(self, key: IPCCacheServerKey, slots: range) -> None:
        """What engines call."""
        done = self.transfer.submit_store(key.request_id, key, self.sources, [list(slots)], None, 1)
        if not done.result(timeout=_TIMEOUT_S):
            raise RuntimeError("a store was refused")

    def retrieve_slots(self, key: IPCCacheServerKey, slots: range) -> None:
        """Retrieves pages by slots of the server's memory; only for blocks of one page."""
        context, (pages,) = self.transfer.engine_driven_context, self.into.values()
        found = context.prepare_retrieve(key, self.instance)
        if found is None or len(found) != len(slots):
            raise RuntimeError("a retrieve missed")
        for slot, view in zip(slots, found, strict=True):
            pages[slot].copy_(view[0])
        if not context.commit_retrieve(key, self.instance):
            raise RuntimeError("a retrieve was not finished")

    def store_slots(self, key: IPCCacheServerKey, slots: range) -> None:
        """Stores pages by slots of the server's memory; only for blocks of one page."""
        context, (pages,) = self.transfer.engine_driven_context, self.sources.values()
        prepared = context.prepare_store(key, self.instance)
        if prepared is None or len(prepared[0]) != len(slots):
            raise RuntimeError("a store was refused")
        for slot, view in zip(slots, prepared[0], strict=True):
            view[0].copy_(pages[slot])
        if not context.commit_store(key, self.instance, []):
            raise RuntimeError("a store was not finished")


class LMCachePeer:
    """LMCache behind the calls that `peer.Peer` describes."""

    def __init__(self, blocks: Blocks, client: RequestClient, server_pid: int, stack: contextlib.ExitStack) -> None:
        self._client = client
        self.pids = [server_pid]
        self._num_slots = len(blocks.sources)
        layered = Worker(1, client, _layered(blocks.all_sources, blocks), _layered(blocks.all_into, blocks))
        stack.callback(layered.transfer.close)
        one_page = Worker(2, client, _one_page(blocks.all_sources, blocks), _one_page(blocks.all_into, blocks))
        stack.callback(one_page.transfer.close)
        self._workers = dict(zip(_CALLS, (layered, one_page, one_page), strict=True))
        self.calls = {"read": list(_CALLS), "write": list(_CALLS)}
        self._looked_up: dict[range, IPCCacheServerKey] = {}
        """Keys whose locks `slots` holds, by the blocks they stand for."""

    def prepare(self, op: str, call: str, batch: int) -> None:
        if op == "write":
            self._client.clear(True).result(timeout=_TIMEOUT_S)
            return
        worker = self._workers[call]
        for at in range(0, self._num_slots, batch):
            slots = range(at, min(at + batch, self._num_slots))
            key = _key(worker.model, slots)
            if not self._look_up(key, len(slots)):
                worker.store(_key(worker.model, slots), slots)
                key = _key(worker.model, slots)
                if not self._look_up(key, len(slots)):
                    raise RuntimeError("a block that was stored is not there")
            if call == "slots":
                self._looked_up[slots] = key
            else:  # which looks up by itself, in the time that counts
                self._client.free_lookup_locks(key, 1).result(timeout=_TIMEOUT_S)

    def move(self, op: str, call: str, slots: range) -> None:
        worker = self._workers[call]
        key = _key(worker.model, slots)
        match op, call:
            case "read", "slots":
                worker.retrieve_slots(self._looked_up.pop(slots), slots)
            case "read", _:
                if not self._look_up(key, len(slots)):
                    raise RuntimeError("a lookup missed")
                worker.retrieve(key, slots)
            case "write", "slots":
                worker.store_slots(key, slots)
            case _:
                worker.store(key, slots)

    def _look_up(self, key: IPCCacheServerKey, num_blocks: int) -> bool:
        """Whether all of them are there; if so, they stay until they are retrieved."""
        self._client.lookup(key, 1).result(timeout=_TIMEOUT_S)
        deadline = time.monotonic() + _TIMEOUT_S
        while (found := self._client.query_prefetch_status(key.request_id).result(timeout=_TIMEOUT_S)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError("a lookup was not answered")
        return bool(found == num_blocks)


def _key(model: str, slots: range) -> IPCCacheServerKey:
    """The first block's tokens begin a prompt of their own, so that every batch is found from its start."""
    tokens = tuple(1 + slots.start * 1_000_000 + i for i in range(len(slots) * _CHUNK_TOKENS))
    return IPCCacheServerKey(
        model_name=model,
        world_size=1,
        worker_id=0,
        token_ids=tokens,
        start=0,
        end=len(tokens),
        request_id=uuid.uuid4().hex,
        num_kv_readers=1,
    )


@contextlib.contextmanager
def start(blocks: Blocks) -> Iterator[LMCachePeer]:
    port, name = free_port(), f"kvtier-bench-{os.getpid()}"
    size_gb = str(-(-_ROOM * blocks.payload_bytes * len(blocks.sources) // (1 << 30)))
    command = [Path(sys.executable).with_name("lmcache"), "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(free_port()), "--shm-name", name]
    command += ["--supported-transfer-mode", "engine_driven"]
    command += ["--l1-size-gb", size_gb, "--l1-init-size-gb", size_gb, "--eviction-policy", "LRU"]
    command += ["--chunk-size", str(_CHUNK_TOKENS), "--prometheus-port", str(free_port())]
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_memory, name)
        pid = stack.enter_context(server(command))
        wait_for("lmcache server", lambda: listens(port))
        client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        stack.callback(client.close)
        yield LMCachePeer(blocks, client, pid, stack)


def _forget_memory(name: str) -> None:
    """What a server that was killed has left behind."""
    for segment in Path("/dev/shm").glob(f"*{name}*"):
        segment.unlink(missing_ok=True)


def _one_page(memory: Bytes, blocks: Blocks) -> _PagedKv:
    """One layer of one plane: pages x tokens x width."""
    pages = torch.from_numpy(memory).view(torch.bfloat16)
    width = _width(blocks.payload_bytes, _CHUNK_TOKENS)
    return {"layer.0": pages.view(len(blocks.sources), _CHUNK_TOKENS, width)}


def _layered(memory: Bytes, blocks: Blocks) -> _PagedKv:
    """Per layer: keys and values x pages x tokens x heads x head dimension."""
    width = _width(blocks.payload_bytes, _NUM_LAYERS * 2 * _CHUNK_TOKENS)
    num_heads = width // _HEAD_DIM if width % _HEAD_DIM == 0 else 1
    shape = (_NUM_LAYERS, 2, len(blocks.sources), _CHUNK_TOKENS, num_heads, width // num_heads)
    return {
        f"layer.{i}": of_layer for i, of_layer in enumerate(torch.from_numpy(memory).view(torch.bfloat16).view(shape))
    }


def _width(payload_bytes: int, num_rows: int) -> int:
    """Elements in each row of a block."""
    width, rest = divmod(payload_bytes, num_rows * torch.bfloat16.itemsize)
    if rest:
        raise RuntimeError(f"blocks of {payload_bytes} bytes do not divide into {num_rows} rows of bfloat16")
    return width


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(start)
