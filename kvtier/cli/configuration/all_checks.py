"""What all installed packages find in a configuration, for `kvtier config check` and `kvtier doctor` alike."""

import difflib
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter

from kvtier.config import Config
from kvtier.config.fields import OVERRIDE_PREFIX
from kvtier.config.findings import Finding, Severity
from kvtier.config.reference import keys

CHECKS = "kvtier.config_checks"
"""Entry points: name -> `kvtier.config.findings.Checks`."""
_MISSPELT = 0.9
"""How much the name of a variable resembles a key that it was perhaps meant for, as `difflib` counts."""


def findings_of(config: Config) -> list[Finding]:
    """Returns each finding once, errors first. It opens no connection and changes nothing."""
    found = [finding for check in checks_of(config) for finding in check()]
    order = list(Severity)
    return sorted(dict.fromkeys(found), key=lambda finding: order.index(finding.severity))


def checks_of(config: Config) -> list[Callable[[], Iterable[Finding]]]:
    """Returns what gives these findings, in parts that depend on each other in nothing."""
    entries = entry_points(group=CHECKS)
    return [
        partial(_nothing_set, config),
        partial(_unheard_variables, config),
        *(partial(_found_by, entry, config) for entry in entries),
    ]


def _found_by(entry: EntryPoint, config: Config) -> Iterable[Finding]:
    try:
        yield from entry.load()(config)
    except OSError as error:  # most often a folder that this user may not enter
        yield Finding(Severity.ERROR, "", f"{error}; run this as the user that the process has, or correct the path")


def _nothing_set(config: Config) -> Iterable[Finding]:
    if not config.model_fields_set:
        yield Finding(Severity.WARNING, "", "no key is set: it is neither an engine's file nor a pool's")


def _unheard_variables(config: Config) -> Iterable[Finding]:
    """Variables that nearly name a key: with single underscores, in lower case, or misspelt."""
    prefixed = [variable for variable in config.references.environ if variable.upper().startswith("KVTIER_")]
    used = config.model_dump_json()
    unheard = [name for name in prefixed if not name.startswith(OVERRIDE_PREFIX) and f'"env:{name}"' not in used]
    paths = [key.path for key in keys()] if unheard else []
    for variable in unheard:
        flat = variable.upper().removeprefix("KVTIER_").strip("_").replace("__", "_")
        meant = {_flat(path): path for path in _paths_near(flat, paths, config)}
        for close in difflib.get_close_matches(flat, meant, n=1, cutoff=_MISSPELT):
            path = meant[close]
            name = OVERRIDE_PREFIX + path.upper().replace(".", "__")
            yield Finding(Severity.WARNING, path, f"the variable {variable} does not set it; {name} would")


def _flat(path: str) -> str:
    return path.replace(".", "_").upper()


def _paths_near(flat: str, paths: Iterable[str], config: Config) -> Iterable[str]:
    """The keys that a variable may have been meant for: those of a named table only where the variable begins with the
    table and one of its names, for there may be thousands, and no others that a variable cannot reach."""
    for path in paths:
        table, is_named, _ = path.partition(".NAME.")
        if not is_named:
            yield path
        elif flat.startswith(f"{_flat(table)}_"):
            for name in attrgetter(table)(config):
                if "__" not in name and flat.startswith(_flat(f"{table}.{name}.")):
                    yield path.replace(".NAME.", f".{name}.")
