"""`make fuzz`: every target under atheris (libFuzzer), one after the other, for as long as you like.

    python tests/fuzz/fuzz.py --seconds 600 --json report.json
    python tests/fuzz/fuzz.py --only segment,disk --seconds 3600 --corpus .venv/fuzz-corpus

The corpus grows from run to run. Ends with 1 when something was found: the input lies beside the corpus, and
`python tests/fuzz/fuzz.py --only TARGET --replay FILE` runs it again.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rigs"))
sys.path.insert(0, str(Path(__file__).parent))

from fuzz_targets import TARGETS
from kvtier.cli.options import require_writable
from kvtier.errors import ConfigError

_PULSE = re.compile(r"^#\d+\s+\w+\s+cov: (\d+) ft: (\d+) corp: (\d+)/", re.MULTILINE)
_EXECUTED = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
_PEAK = re.compile(r"stat::peak_rss_mb:\s+(\d+)")
_TOOK = re.compile(r"^Done \d+ runs? in (\d+) second", re.MULTILINE)
_PROGRESS = re.compile(r"^#(\d+)\s", re.MULTILINE)
_BOUNDS = ("-timeout=20", "-rss_limit_mb=1024", "-malloc_limit_mb=512")
"""The seconds that one input may take, and the memory of the process. More is a finding."""
_ROUND_S = 30.0
"""How long one process runs."""
_PATIENCE_S = 60.0
"""How much longer than it was told a process may take, to start and to end."""


@dataclass(slots=True)
class Report:
    """What became of one target."""

    reads: str
    seconds: float
    executions: int = 0
    edges: int = 0
    """Edges of kvtier's Python code that any input has reached."""
    features: int = 0
    corpus: int = 0
    """Inputs that each reach something that no other one does."""
    peak_rss_mb: int = 0
    findings: list[str] = field(default_factory=list)
    """Files of inputs that crashed, raised, hung or took too much memory."""


def fuzz(name: str, seconds: float, corpus: Path, *, seed: int) -> tuple[Report, str]:
    """Runs one target, in rounds that share the corpus, until its time is over or something is found.

    atheris itself keeps some memory of every execution, 1.7 KiB with `stored` and 8 with `segment`, where the same
    inputs take none without it: a process that went on for long would come to the bound of its memory for that alone.

    :return: the report, and what the last process said.
    """
    report = Report(TARGETS[name].about, seconds)
    said, left_s, number = "", seconds, 0
    while left_s > 0 and not report.findings:
        round_s = left_s if left_s < 1.5 * _ROUND_S else _ROUND_S
        said = _round(name, round_s, corpus, seed + number if seed else 0, report)
        took = _TOOK.findall(said)
        left_s -= max(1.0, min(float(took[-1]), round_s)) if took else round_s
        number += 1
    return report, said


def _round(name: str, seconds: float, corpus: Path, seed: int, report: Report) -> str:
    """Runs one process and adds what came of it to the report; what it said last."""
    found = corpus / "findings" / name
    found.mkdir(parents=True, exist_ok=True)
    before = set(found.iterdir())
    options = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", f"-artifact_prefix={found}/"]
    options.append(f"-runs={TARGETS[name].most_runs}")
    done = _child(name, corpus / name, [*options, "-print_final_stats=1", *_BOUNDS], seconds + _PATIENCE_S)
    report.findings = sorted(str(path) for path in set(found.iterdir()) - before)
    if done.returncode and not report.findings:
        report.findings.append(f"the process ended with {done.returncode} without an input")
    pulses = _PULSE.findall(done.stderr)
    if pulses:
        report.edges, report.features, report.corpus = map(int, pulses[-1])
    executed = _EXECUTED.findall(done.stderr) or _PROGRESS.findall(done.stderr)
    report.executions += int(executed[-1]) if executed else 0
    peak = _PEAK.findall(done.stderr)
    report.peak_rss_mb = max(report.peak_rss_mb, int(peak[-1]) if peak else 0)
    return (done.stdout + done.stderr)[-6000:]


def _child(name: str, corpus: Path, options: Sequence[str], patience_s: float) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(Path(__file__).with_name("fuzz_child.py")), name, str(corpus), *options]
    try:
        with tempfile.TemporaryDirectory(prefix="kvtier-fuzz-") as folder:  # its process ends without a clean-up
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=patience_s,
                env={**os.environ, "TMPDIR": folder},
            )
    except subprocess.TimeoutExpired as error:  # libFuzzer's own timeout has not helped
        said = error.stderr or b""
        return subprocess.CompletedProcess(command, 1, "", said.decode(errors="replace") + "\nhangs")


def replay(name: str, path: Path) -> None:
    """One input, without atheris; whatever is wrong is raised."""
    with TARGETS[name].opened() as execute:
        execute(path.read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of all targets together")
    parser.add_argument("--only", default=",".join(TARGETS), help="targets, with commas between")
    parser.add_argument("--corpus", type=Path, default=Path(".venv/fuzz-corpus"), help="folder of inputs and findings")
    parser.add_argument("--seed", type=int, default=0, help="of libFuzzer; 0: another one each time")
    parser.add_argument("--json", type=Path, default=None, help="write a report to this file")
    parser.add_argument("--replay", type=Path, default=None, help="run this one input of the target in --only")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := set(names) - set(TARGETS):
        parser.error(f"--only: {sorted(unknown)} unknown; known are {', '.join(TARGETS)}")
    if arguments.replay is not None:
        replay(names[0], arguments.replay)
        return 0
    if arguments.json is not None:
        try:
            require_writable("--json", arguments.json)
        except ConfigError as error:
            parser.error(str(error))
    reports: dict[str, Report] = {}
    started_s = time.monotonic()
    for name in names:
        reports[name], said = fuzz(name, arguments.seconds / len(names), arguments.corpus, seed=arguments.seed)
        report = reports[name]
        print(
            f"[{time.monotonic() - started_s:.0f} s] {name}: {report.executions:,} executions, corpus {report.corpus}, "
            f"{report.edges} edges, {report.peak_rss_mb} MB, {len(report.findings)} findings",
            flush=True,
        )
        if report.findings:
            print(said, *report.findings, sep="\n", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({name: asdict(report) for name, report in reports.items()}, indent=1))
    return 1 if any(report.findings for report in reports.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
