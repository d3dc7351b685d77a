"""One run of `make chaos`: reference answers, then faults by plan while three engines are asked, then healing."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from chaos_checks import Healing, Names, Quotas, listed_tenants, told_every
from chaos_clients import Asker, History, Prompt, Tally, ask, new_client, prompts
from chaos_faults import Faults
from chaos_schedule import ENGINES, POOLS, TARGETS, Fault, schedule
from chaos_site import Site, running_site

_STEP_S = 0.05
_TELL_S = 10.0
_NUM_QUESTIONS = 2
_FRESH = 4
"""Prompts that are kept for the healing."""


@dataclass(slots=True)
class ChaosReport:
    """What a run has found. Without `problems` all is well."""

    seed: int
    seconds: float
    schedule: list[Fault] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Kinds of faults that cannot be produced on this machine."""
    faults: dict[str, int] = field(default_factory=dict)
    """How many there were, by kind."""
    pieces_hurt: dict[str, int] = field(default_factory=dict)
    """Pieces of streams that met a fault, by link."""
    counts: dict[str, int] = field(default_factory=dict)
    hit_tokens: dict[str, int] = field(default_factory=dict)
    """By tier."""
    pool_reads: dict[str, int] = field(default_factory=dict)
    """Blocks, by where a pool had them: what a pool that was killed did after the last look is not in it."""
    slowest_s: float = 0.0
    """The slowest request, stops of its engine included."""
    most_bytes: dict[str, int] = field(default_factory=dict)
    """By place and tenant."""
    quota_samples: int = 0
    names: dict[str, int] = field(default_factory=dict)
    """Store keys that were found at the end, by place and whose they are."""
    healed_s: float = 0.0
    problems: list[str] = field(default_factory=list)


class Chaos:
    """One run."""

    def __init__(
        self, folder: Path, *, seed: int, seconds: float, num_documents: int, kinds: Collection[str] = tuple(TARGETS)
    ) -> None:
        """:param seconds: in which faults begin and end; starts, references and healing come on top."""
        self._folder, self._kinds = folder, set(kinds)
        self._history, self._tally = History(), Tally()
        asked = prompts(seed, num_documents + _FRESH, _NUM_QUESTIONS)
        self._asked, self._fresh = asked[: num_documents * _NUM_QUESTIONS], asked[num_documents * _NUM_QUESTIONS :: 2]
        self.report = ChaosReport(seed, seconds)

    def run(self, tell: Callable[[str], None]) -> ChaosReport:
        """:param tell: gets the schedule, and a line of progress every few seconds."""
        report = self.report
        with running_site(self._folder, report.seed) as site:
            report.left_out = sorted(self._kinds & site.cannot)
            report.schedule = schedule(report.seed, report.seconds, self._kinds - site.cannot)
            for fault in report.schedule:
                tell(f"plan: {fault.at_s:6.1f} s {fault}")
            right = self._references(site, tell)
            askers = {
                name: Asker(site.members[name], right, self._asked, self._history, self._tally, report.seed)
                for name in ENGINES
            }
            try:
                self._storm(site, askers, tell)
                report.healed_s = round(Healing(site, askers, self._history, self._tally).heals(self._fresh), 2)
                self._look_at_all(site)
            finally:
                for asker in askers.values():
                    asker.close()
        tally = self._tally
        report.counts = {"wrong": 0, "interrupted": 0, "foreign_hit_tokens": 0, "over_cap": 0} | dict(tally.counts)
        report.hit_tokens, report.slowest_s = dict(tally.hit_tokens), round(tally.slowest_s, 2)
        report.problems += tally.problems
        tell(f"{'FAILED' if report.problems else 'passed'}: {report.faults} {report.counts} {report.hit_tokens}")
        return report

    def _references(self, site: Site, tell: Callable[[str], None]) -> dict[Prompt, list[int]]:
        engine, http = site.uncached_engine(), new_client()
        engine.start()
        try:
            engine.service.ready()
            return {prompt: ask(http, engine.url, prompt).tokens for prompt in (*self._asked, *self._fresh)}
        finally:
            http.close()
            engine.kill()
            tell("the right answers are known")

    def _storm(self, site: Site, askers: dict[str, Asker], tell: Callable[[str], None]) -> None:
        faults, quotas = Faults(site, self.report.schedule, tell), Quotas(site, self._tally)
        for name in (*POOLS, *ENGINES):
            site.members[name].service.ready()
        for started in (quotas, *askers.values()):
            started.start()
        began_s, progress = time.monotonic(), told_every(_TELL_S, tell)
        try:
            while faults.go_on(time.monotonic() - began_s):
                progress(
                    lambda: f"{time.monotonic() - began_s:6.1f} s {dict(self._tally.counts)} {self._tally.hit_tokens}"
                )
                for member in site.members.values():
                    if member.has_died():
                        self._tally.problem(f"{member.name} has ended by itself: see its log")
                        member.start()
                time.sleep(_STEP_S)
        finally:
            faults.end()
            for asker in askers.values():
                asker.stop()
            quotas.stop()
        self.report.faults = dict(faults.counts)
        self.report.pieces_hurt = {name: link.num_hurt for name, link in site.links.items()}
        self.report.pool_reads = quotas.pool_reads()
        self.report.most_bytes, self.report.quota_samples = quotas.most, quotas.num_samples

    def _look_at_all(self, site: Site) -> None:
        """Whose blocks lie where, at the end. Stops the site."""
        names = Names(self._history, self._tally)
        listed = listed_tenants(site.members["pool-a"])
        if {"red", "blue"} != set(listed["tenants"]):
            self._tally.problem(f"`kvtier tenants list` shows {sorted(listed['tenants'])}")
        names.look_at_redis(site)
        self.report.problems += site.end()
        for pool in POOLS:
            names.look_at_disk(pool, site.disk_dir(pool))
        self.report.names = dict(names.counts)
