"""A minute of `make chaos`, and that it would find something."""

from pathlib import Path

import pytest

from chaos_checks import Names
from chaos_clients import Answer, Asker, History, Tally, prompts
from chaos_run import Chaos
from chaos_schedule import TARGETS, schedule
from chaos_site import Member
from kvtier.identity.keys import NamespaceId, StoreKey, rank_keys, tenant_id

SEED = 5
SECONDS = 18.0
(PROMPT,) = prompts(SEED, 1, 1)
ANSWER = [1, 2, 3]


def test_every_answer_is_right_whatever_fails(tmp_path: Path) -> None:
    report = Chaos(tmp_path, seed=SEED, seconds=SECONDS, num_documents=2).run(print)
    assert report.problems == []
    assert set(report.faults) == set(TARGETS) - set(report.left_out)
    assert report.hit_tokens["pool"] > 0
    assert report.counts["requests"] > 0
    assert report.quota_samples > 0


def test_a_seed_is_a_schedule() -> None:
    planned = schedule(SEED, 3600.0)
    assert planned == schedule(SEED, 3600.0) != schedule(SEED + 1, 3600.0)
    assert {(fault.kind, fault.target) for fault in planned} == {(k, t) for k, all_ in TARGETS.items() for t in all_}
    busy_s: dict[str, float] = {}
    for fault in planned:
        target = {"disk-a": "pool-a"}.get(fault.target, fault.target.removesuffix("-io"))
        assert fault.at_s >= busy_s.get(target, 0.0), "what has failed is put right before it fails anew"
        busy_s[target] = fault.end_s


def asker(history: History, tally: Tally) -> Asker:
    engine = Member("engine-2", [], Path(), "http://127.0.0.1:1")
    return Asker(engine, {PROMPT: ANSWER}, [PROMPT], history, tally, SEED)


@pytest.mark.parametrize(
    ("answer", "asked_by", "problems"),
    [
        (Answer(ANSWER, {"pool": 160}), ["blue", "blue"], 0),
        (Answer([1, 2, 4], {}), ["blue"], 1),
        (Answer(ANSWER, {"pool": 16}), ["red", "blue"], 1),
    ],
)
def test_wrong_tokens_and_hits_of_others_are_noticed(answer: Answer, asked_by: list[str], problems: int) -> None:
    history, tally = History(), Tally()
    for tenant in asked_by:
        history.note(tenant, PROMPT)
    client = asker(history, tally)
    client._compare(PROMPT, answer, 0.1)
    client.close()
    assert len(tally.problems) == problems


def test_blocks_in_anothers_place_are_noticed() -> None:
    history, tally = History(), Tally()
    history.note("red", PROMPT)
    namespace = NamespaceId(bytes(16))
    own = rank_keys(history.blocks("red", PROMPT), namespace)
    foreign = [StoreKey(tenant_id("blue") + key[16:]) for key in own]
    names = Names(history, tally)
    names.look("redis", own)
    assert tally.problems == []
    names.look("redis", foreign)
    assert len(tally.problems) == len(foreign) > 0
