"""What all installed packages find in a configuration, for `kvtier config check` and `kvtier doctor` alike."""

from importlib.metadata import entry_points

from kvtier.config import Config
from kvtier.config.findings import Finding, Severity

CHECKS = "kvtier.config_checks"
"""Entry points: name -> `kvtier.config.findings.Checks`."""


def findings_of(config: Config) -> list[Finding]:
    """Returns each finding once, errors first. It opens no connection and changes nothing."""
    found: list[Finding] = []
    for entry in entry_points(group=CHECKS):
        try:
            for finding in entry.load()(config):
                found.append(finding)
        except OSError as error:  # most often a folder that this user may not enter
            text = f"{error}; run this as the user that the process has, or correct the path"
            found.append(Finding(Severity.ERROR, "", text))
    if not found and not config.model_fields_set:
        found = [Finding(Severity.WARNING, "", "no key is set: it is neither an engine's file nor a pool's")]
    order = list(Severity)
    return sorted(dict.fromkeys(found), key=lambda finding: order.index(finding.severity))
