"""What a run has found, line by line in a file, so that whatever is killed takes no finished row with it.

The file is only ever appended to. It lies beside the JSON that is made of it, and further runs go on with it: of each
part, the last time that it ran counts, with the machine, the commit and the date of that time.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtier_bench.gpu.measuring.rows import case_of
from kvtier_bench.measuring.report import Case

_KILLED = "the run was killed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one part."""

    part: str
    seconds: float
    cases: tuple[Case, ...]
    """The cases that the part had given when it ended, however it ended."""
    problem: str = ""
    """Empty when it ended well."""
    said: str = ""
    """The end of what it wrote, warnings say: one without a problem may have something to tell as well."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The facts of the run on which its figures depend."""

    @property
    def failed(self) -> bool:
        return bool(self.problem) or any(case.detail.startswith("FAILED") for case in self.cases)


class Journal:
    """The file. Several processes may write to it, whole lines each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, part: str, facts: Mapping[str, Any]) -> None:
        """Begins a part: from now on, its rows are those of this time."""
        self._append({"begin": part, "facts": dict(facts)})

    def row(self, part: str, case: Case) -> None:
        """Adds a row, which is kept as soon as this returns."""
        self._append({"row": part, "case": asdict(case)})

    def end(self, part: str, *, seconds: float, problem: str, said: str) -> None:
        self._append({"end": part, "seconds": seconds, "problem": problem, "said": said})

    def outcomes(self) -> list[Outcome]:
        """The last outcome of every part, in the order in which the parts first ran."""
        found: dict[str, Outcome] = {}
        for record in self._records():
            match record:
                case {"begin": part, "facts": facts}:
                    found[part] = Outcome(part, 0.0, (), _KILLED, facts=facts)
                case {"row": part, "case": fields} if part in found:
                    found[part] = replace(found[part], cases=(*found[part].cases, case_of(fields)))
                case {"end": part, "seconds": seconds, "problem": problem, "said": said} if part in found:
                    found[part] = replace(found[part], seconds=seconds, problem=problem, said=said)
        return list(found.values())

    def _append(self, record: dict[str, Any]) -> None:
        # A line begins by ending the one before: a process may have been killed in the middle of it.
        line = f"\n{json.dumps(record)}\n".encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    def _records(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            try:
                yield json.loads(line or "{}")
            except ValueError:
                continue  # half a line


def document(outcomes: list[Outcome]) -> dict[str, Any]:
    """What gpu.json holds."""
    return {"parts": [asdict(outcome) for outcome in outcomes]}


def outcomes_of(content: Mapping[str, Any]) -> list[Outcome]:
    """The inverse of `document`, of what JSON made of it."""
    return [
        Outcome(**{**part, "cases": tuple(case_of(fields) for fields in part["cases"])}) for part in content["parts"]
    ]
