"""`python -m kvtier_bench.gpu`, also `make gpu`: all that a GPU is needed for, in one run of nine minutes."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.markup import escape

from kvtier.clock import MONOTONIC
from kvtier.system.machine import commit, hardware
from kvtier_bench.gpu.measuring.rows import SHORT
from kvtier_bench.gpu.run.journal import Journal, Outcome, document
from kvtier_bench.gpu.run.parts import ALL, PARTS, SECOND, THIRD, TOTAL_S, Part, scaled
from kvtier_bench.gpu.run.render import load, markdown
from kvtier_bench.gpu.run.runner import Run, run_parts
from kvtier_bench.measuring.report import report

_FILE_COLUMNS = "140"
"""The width of the table where it goes to no terminal."""
_OUTPUT_FOLDER = "OUT"
"""An environment variable that names a folder for results, where a machine keeps nothing else."""
_PATIENCE_S = 120.0
"""The longest time to open the device and import torch, of which the first takes seconds with a cold page cache."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when every part ended well and every check passed, 2 without a GPU."""
    begin, options = MONOTONIC(), _options(arguments)
    total_s = TOTAL_S if options.seconds is None else options.seconds
    if options.render is not None:
        print(markdown(load(options.render)))
        return 0
    machine = machine_facts()
    if machine["device"] is None and not options.tiny:
        print("no CUDA device: nothing was checked or measured (--tiny tries the parts out)", file=sys.stderr)
        return 2
    path = options.json or default_path(os.environ, tiny=options.tiny)
    run = Run(
        Journal(path.with_suffix(".jsonl")),
        _facts(machine, tiny=options.tiny),
        total_s=total_s - (MONOTONIC() - begin),
        tiny=options.tiny,
        plant=options.plant,
        say=_say,
    )
    outcomes: list[Outcome] = []
    for outcome in run_parts(run, _chosen(options, run.total_s)):
        outcomes.append(outcome)
        path.write_text(json.dumps(document(run.journal.outcomes()), indent=2) + "\n")
    _print(outcomes, machine, tiny=options.tiny)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def default_path(environ: Mapping[str, str], *, tiny: bool) -> Path:
    """Results of either size are never mixed."""
    folder = Path(environ.get(_OUTPUT_FOLDER) or ".")
    return (folder if folder.is_dir() else Path()) / ("gpu-tiny.json" if tiny else "gpu.json")


def machine_facts() -> dict[str, str | None]:
    """What figures depend on; no device is None. Asked in a process of its own, which holds no memory of it afterwards.

    A process that fails or hangs has not said that there is no device: then everything is unknown, and parts will tell.
    """
    script = (
        "import json, torch, triton\n"
        "has = torch.cuda.is_available()\n"
        "p = torch.cuda.get_device_properties(0) if has else None\n"
        "print(json.dumps({'device': p.name if has else None, 'cuda': torch.version.cuda, "
        "'multiprocessors': str(p.multi_processor_count) if has else None, "
        "'torch': torch.__version__, 'triton': triton.__version__}))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=_PATIENCE_S
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        _say(f"what there is here cannot be told: {error}")
        if isinstance(error, subprocess.CalledProcessError):
            _say(error.stderr.rstrip())
        return dict.fromkeys(("device", "cuda", "multiprocessors", "torch", "triton"), "unknown")
    facts: dict[str, str | None] = json.loads(done.stdout)
    return facts


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [part.name for part in ALL]
    parser = argparse.ArgumentParser(prog="python -m kvtier_bench.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"only these: {', '.join(names)}")
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument("--second", action="store_true", help=f"the second run: {', '.join(p.name for p in SECOND)}")
    runs.add_argument("--third", action="store_true", help=f"more time for {', '.join(p.name for p in THIRD)}")
    parser.add_argument("--json", type=Path, help="where results are written ($OUT/gpu.json, or else gpu.json)")
    parser.add_argument(
        "--seconds", type=float, help=f"for everything ({TOTAL_S:.0f}); of parts that are named, each has more"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, also without a GPU: whether it works at all")
    parser.add_argument("--render", type=Path, metavar="FILE", help="only print results as a table in Markdown")
    parser.add_argument("--plant", default="", metavar="PART", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = {*options.parts, *filter(None, [options.plant])} - set(names)
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    return options


def _chosen(options: argparse.Namespace, total_s: float) -> list[Part]:
    if options.parts:
        named = [part for part in ALL if part.name in options.parts]
        return named if options.seconds is None else scaled(named, total_s)
    return list(SECOND if options.second else THIRD if options.third else PARTS)


def _facts(machine: Mapping[str, str | None], *, tiny: bool) -> dict[str, object]:
    date = datetime.now(UTC).date().isoformat()
    return {"date": date, "commit": commit(), "hardware": hardware(), "machine": dict(machine), "tiny": tiny}


def _print(outcomes: Sequence[Outcome], machine: Mapping[str, str | None], *, tiny: bool) -> None:
    # What failed is shown as it is: tracebacks are no markup.
    cases = [replace(case, detail=escape(case.detail)) for outcome in outcomes for case in outcome.cases]
    notes = [" ".join(f"{name} {value}" for name, value in machine.items())]
    notes += [f"short of its bar: {case.op}: {case.name} ({case.detail})" for case in cases if SHORT in case.detail]
    notes += [escape(f"{of.part}: {of.problem}\n{of.said}".rstrip()) for of in outcomes if of.problem]
    report("On the GPU" if not tiny else "Tiny: no figure means anything", cases, as_json=False, notes=notes)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", _FILE_COLUMNS)
    sys.exit(main())
