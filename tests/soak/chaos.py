"""`make chaos`: engines on a real model, pools, disk and Redis under faults by plan; every answer is compared.

    python tests/soak/chaos.py --seconds 300 --seed 7 --json report.json

The same seed plans the same faults and asks the same prompts; what meets what is up to the machine. `--plan` prints the
plan alone. Ends with 1 when something was found.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rigs"))

from chaos_run import Chaos
from chaos_schedule import TARGETS, schedule
from kvtier.cli.options import require_writable
from kvtier.errors import ConfigError

_NUM_DOCUMENTS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="in which faults begin")
    parser.add_argument("--seed", type=int, default=None, help="of faults and prompts; a random one by default")
    parser.add_argument("--kinds", nargs="+", choices=TARGETS, default=list(TARGETS), help="of faults; all by default")
    parser.add_argument("--plan", action="store_true", help="print what would go wrong when, and do nothing")
    parser.add_argument("--json", type=Path, default=None, help="write a report to this file")
    parser.add_argument("--keep", type=Path, default=None, help="an empty folder for logs and configurations, kept")
    arguments = parser.parse_args()
    if arguments.json is not None:
        try:
            require_writable("--json", arguments.json)
        except ConfigError as error:
            parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are ended too
    seed = random.randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    if arguments.plan:
        print("\n".join(f"{fault.at_s:6.1f} s {fault}" for fault in schedule(seed, arguments.seconds, arguments.kinds)))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvtier-chaos-") as folder:
        chaos = Chaos(
            arguments.keep or Path(folder),
            seed=seed,
            seconds=arguments.seconds,
            num_documents=_NUM_DOCUMENTS,
            kinds=arguments.kinds,
        )
        report = chaos.run(lambda line: print(line, flush=True))
    for problem in report.problems:
        print(f"PROBLEM: {problem}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(report), indent=1))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
