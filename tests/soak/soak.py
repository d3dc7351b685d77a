"""`make soak`, `make chaos`: a pool under random load and faults, for as long as you like.

    python tests/soak/soak.py --seconds 600 --json report.json
    python tests/soak/soak.py --sweep --seconds 20

The same seed repeats the same faults, but not their exact moments. Ends with 1 when something was found.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rigs"))

from kvtier.cli.options import require_writable
from kvtier.errors import ConfigError
from soak_rig import PATHS, Faults, Report, Soak

STORMY = Faults(kill_client_s=2.0, stop_client_s=2.0, kill_pool_s=12.0, restart_pool_s=20.0)
CALM = Faults(kill_client_s=2.0, stop_client_s=2.0)
_SWEPT = {
    "clients killed": Faults(kill_client_s=0.5),
    "clients stopped": Faults(stop_client_s=0.5),
    "pool killed": Faults(kill_pool_s=2.0),
    "pool restarted": Faults(restart_pool_s=3.0),
    "pool stopped": Faults(freeze_pool_s=3.0),
    "all of it": Faults(kill_client_s=0.7, stop_client_s=0.7, kill_pool_s=5.0, restart_pool_s=5.0, freeze_pool_s=5.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of one run")
    parser.add_argument("--seed", type=int, default=None, help="of clients and faults; a random one by default")
    parser.add_argument("--sweep", action="store_true", help="one run per kind of fault and path")
    parser.add_argument("--json", type=Path, default=None, help="write a report to this file")
    arguments = parser.parse_args()
    if arguments.json is not None:
        try:
            require_writable("--json", arguments.json)
        except ConfigError as error:
            parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the pool and its clients are ended too
    seed = random.randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    started_s = time.monotonic()
    if arguments.sweep:
        runs = [
            (f"{name}, {'+'.join(paths)}", faults, Faults(), paths)
            for name, faults in _SWEPT.items()
            for paths in (*((path,) for path in PATHS), PATHS)
        ]
    else:
        runs = [("soak", STORMY, CALM, PATHS)]
    reports: dict[str, Report] = {}
    for name, stormy, calm, paths in runs:
        print(f"[{time.monotonic() - started_s:.0f} s] {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="kvtier-soak-") as folder:
            soak = Soak(Path(folder), seed=seed, seconds=arguments.seconds, paths=paths)
            reports[name] = soak.run(stormy, calm, lambda line: print("  " + line, flush=True))
        for problem in reports[name].problems:
            print(f"  PROBLEM: {problem}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({name: asdict(report) for name, report in reports.items()}, indent=1))
    return 1 if any(report.problems for report in reports.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
