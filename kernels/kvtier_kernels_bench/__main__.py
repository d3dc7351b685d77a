"""`python -m kvtier_kernels_bench`, also `make gpu`: all that a GPU is needed for, in one run of eight minutes."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.markup import escape

from kvtier.bench.report import commit, hardware, report
from kvtier.clock import MONOTONIC
from kvtier_kernels_bench.parts import PARTS, TOTAL_S
from kvtier_kernels_bench.runner import Outcome, run_parts

_FILE_COLUMNS = "140"
"""Of the table where it goes to no terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when every part ended well and every check passed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_kernels_bench", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"only these: {', '.join(names)}")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where all of it is written (gpu.json)")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help=f"for everything ({TOTAL_S:.0f})")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, also without a GPU: whether it works at all")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(names)
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    begin = MONOTONIC()
    machine = machine_facts()
    if machine["device"] is None and not options.tiny:
        print("no CUDA device: nothing was checked or measured (--tiny tries the parts out)", file=sys.stderr)
        return 2
    chosen = [part for part in PARTS if not options.parts or part.name in options.parts]
    outcomes: list[Outcome] = []
    total_s = options.seconds - (MONOTONIC() - begin)
    for outcome in run_parts(chosen, total_s=total_s, tiny=options.tiny, say=_say):
        outcomes.append(outcome)
        _write(options.json, machine, outcomes, tiny=options.tiny)  # after each: whatever comes, nothing is lost
    # What failed is shown as it is: tracebacks are no markup.
    cases = [replace(case, detail=escape(case.detail)) for outcome in outcomes for case in outcome.cases]
    notes = [" ".join(f"{name} {value}" for name, value in machine.items())]
    notes += [escape(f"{of.part}: {of.problem}\n{of.said}".rstrip()) for of in outcomes if of.problem]
    report("On the GPU" if not options.tiny else "Tiny: no figure means anything", cases, as_json=None, notes=notes)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def machine_facts() -> dict[str, str | None]:
    """What figures depend on. Asked in a process of its own, which holds no memory of the device afterwards."""
    script = (
        "import json, torch, triton\n"
        "has = torch.cuda.is_available()\n"
        "p = torch.cuda.get_device_properties(0) if has else None\n"
        "print(json.dumps({'device': p.name if has else None, 'cuda': torch.version.cuda, "
        "'multiprocessors': str(p.multi_processor_count) if has else None, "
        "'torch': torch.__version__, 'triton': triton.__version__}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    facts: dict[str, str | None] = json.loads(done.stdout)
    return facts


def _write(path: Path, machine: dict[str, str | None], outcomes: Sequence[Outcome], *, tiny: bool) -> None:
    content: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "commit": commit(),
        "machine": machine,
        "tiny": tiny,
        "parts": [
            {
                "part": of.part,
                "seconds": of.seconds,
                "problem": of.problem,
                "said": of.said,
                "cases": [asdict(case) for case in of.cases],
            }
            for of in outcomes
        ],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", _FILE_COLUMNS)
    sys.exit(main())
