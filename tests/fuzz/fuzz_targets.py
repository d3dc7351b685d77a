"""All targets, by name."""

from fuzz_blocks import ENGINE, POOL
from fuzz_codecs import CHUNKS, STORED
from fuzz_grpc import FRAMES, SERVICER
from fuzz_redis import REDIS
from fuzz_segments import DISK, SEGMENT
from fuzz_target import Target

TARGETS: dict[str, Target] = {
    target.name: target for target in (CHUNKS, STORED, SEGMENT, DISK, REDIS, POOL, ENGINE, FRAMES, SERVICER)
}
