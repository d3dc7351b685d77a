"""A worker process: one mover, its device memory and its own disk tier, driven over stdin and stdout.

Frames are u32le length and msgpack [verb, argument]; every frame is answered by one frame.
"""

import struct
import sys

import msgpack
import numpy as np

from hierarchy_rig import BLOCK_BYTES, TENANT
from kvtier.device.kv import HostMemoryKV
from kvtier.identity.keys import NamespaceId
from kvtier.memory.arena import Arena
from kvtier.offload import InventoryLog, Mover, MoverTiers
from kvtier.offload.messages import decode, encode
from kvtier.tiers.host.tier import HostTier

NUM_SLOTS = 8


def main(rank: int) -> None:
    device = np.random.default_rng(rank).integers(0, 256, (32, BLOCK_BYTES), dtype=np.uint8)
    namespace = NamespaceId(bytes([rank]) * 16)
    inventory = InventoryLog([TENANT], namespace)
    disk = HostTier(2**20, slab_bytes=2**16, name="disk", on_event=inventory.on_event)
    mover = Mover(
        namespace=namespace,
        device=HostMemoryKV(device),
        arena=Arena(NUM_SLOTS, BLOCK_BYTES),
        tiers=MoverTiers(by_name={"disk": disk}, inventory=inventory),
    )
    while header := sys.stdin.buffer.read(4):
        verb, argument = msgpack.unpackb(sys.stdin.buffer.read(struct.unpack("<I", header)[0]))
        answer: object = None
        if verb == "submit":
            mover.submit([decode(argument)])
        elif verb == "poll":
            mover.wait(0.02)
            answer = [encode(message) for message in mover.poll()]
        elif verb == "device":
            answer = [device[slot].tobytes() for slot in argument]
        elif verb == "discard":
            answer = disk.discard(argument)
        packed = msgpack.packb(answer)
        sys.stdout.buffer.write(struct.pack("<I", len(packed)) + packed)
        sys.stdout.buffer.flush()
    mover.close()
    disk.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
