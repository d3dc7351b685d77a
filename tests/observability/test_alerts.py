"""Every alert fires when it should, and has its section of the runbook."""

import json
from pathlib import Path
from typing import Any

import yaml

from alerts_cases import CASES, END_OF_DAY, WELL
from promtool import promtool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "observability" / "alerts.yml"


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_every_alert_fires_and_none_when_all_is_well(tmp_path: Path) -> None:
    promtool("check", "rules", RULES)
    assert {rule["alert"] for rule in rules()} == CASES.keys()
    within_an_hour = [_test(alert, CASES[alert]) for alert in CASES if alert not in END_OF_DAY]
    well = {
        "interval": "1m",
        "input_series": _series(WELL),
        "alert_rule_test": [_at("55m", alert, []) for alert in CASES],
    }
    _run(tmp_path / "hour.yml", [*within_an_hour, well], every="1m")
    _run(tmp_path / "day.yml", [_test(alert, CASES[alert]) for alert in END_OF_DAY], every="10m")


def _run(path: Path, tests: list[dict[str, Any]], *, every: str) -> None:
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": every, "tests": tests}))
    promtool("test", "rules", path)


def _test(alert: str, series: list[tuple[str, str]]) -> dict[str, Any]:
    """That it fires, with these series."""
    (rule,) = (rule for rule in rules() if rule["alert"] == alert)
    fires = {"exp_labels": _labels(series, rule), "exp_annotations": _annotations(alert, series, rule)}
    at = _at("26h" if alert in END_OF_DAY else "55m", alert, [fires])
    return {"name": alert, "interval": "1m", "input_series": _series(series), "alert_rule_test": [at]}


def _series(series: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in series]


def _at(time: str, alert: str, expected: list[dict[str, Any]]) -> dict[str, Any]:
    return {"eval_time": time, "alertname": alert, "exp_alerts": expected}


def _labels(series: list[tuple[str, str]], rule: dict[str, Any]) -> dict[str, str]:
    """The labels by which the rule adds up, of the first series."""
    name = series[0][0]
    of_series = dict(pair.split("=") for pair in name[name.index("{") + 1 : -1].replace('"', "").split(","))
    start = rule["expr"].find(" by (")
    kept = rule["expr"][start + 5 : rule["expr"].index(")", start)].split(", ") if start >= 0 else list(of_series)
    return {label: of_series[label] for label in kept if label in of_series} | rule["labels"]


def _annotations(alert: str, series: list[tuple[str, str]], rule: dict[str, Any]) -> dict[str, str]:
    summary = rule["annotations"]["summary"]
    for label, value in _labels(series, rule).items():
        summary = summary.replace(f"{{{{ $labels.{label} }}}}", value)
    share = {"KvtierWritesRefused": "20%", "KvtierFetchesFail": "10%"}.get(alert, "")
    return {**rule["annotations"], "summary": summary.replace("{{ $value | humanizePercentage }}", share)}


def test_every_alert_has_a_section_of_the_runbook() -> None:
    sections = [line[3:] for line in (ROOT / "docs" / "runbook.md").read_text().splitlines() if line.startswith("## ")]
    assert sections == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
