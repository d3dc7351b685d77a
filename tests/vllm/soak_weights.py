"""Thousands of requests while weights change and another connector loads beside ours: what is stored is what was asked.

    python tests/vllm/soak_weights.py --requests 10000 --changes 20

One engine, in this process, with a small model in float32, answers prompts that share prefixes. Between and amid them
its weights change, as those do who train in the loop, by files and past them. Every block that is found in host memory,
on disk and in the pool is then read and compared with KV that an engine without kvtier computes with the weights and
for the tokens that its key says; and so are the answers. Ends with 1 when one differs.

`--without weights` or `--without sight` turns off what notices changes, or what tells whose KV a device block holds.
Then there must be such blocks, or this program could not find any.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

PARTS = ("weights", "sight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--changes", type=int, default=4, help="of weights, evenly spread over the requests")
    parser.add_argument("--seed", type=int, default=None, help="of requests and changes; a random one by default")
    parser.add_argument("--without", choices=PARTS, action="append", default=[])
    parser.add_argument("--json", type=Path, default=None, help="write what was found to this file")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-") as home, ExitStack() as stack:
        # vLLM and kvtier read the environment when they are imported.
        sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "rigs")]
        from vllm_rig import ENVIRON, TOKENS

        os.environ.update(
            ENVIRON | {"HOME": home, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        )
        from model_classes import found_out_here
        from soak_weights_rig import Soak

        from cache_pool import CachePool

        stack.enter_context(found_out_here())
        pool = stack.enter_context(CachePool(Path(home), TOKENS))
        soak = Soak(Path(home), pool, random.Random(seed), without=frozenset(arguments.without))
        report = {"seed": seed, **soak.run(arguments.requests, arguments.changes)}
    report["seconds"] = round(time.monotonic() - begun_s)
    print(json.dumps(report, indent=2), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report))
    return int(bool(report["wrong_blocks"] or report["unexplained_blocks"] or report["wrong_answers"]))


if __name__ == "__main__":
    sys.exit(main())
