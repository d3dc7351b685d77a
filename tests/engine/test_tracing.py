"""One request through an engine and a pool is one trace, which a collector gets from both, and nobody waits for it."""

import signal
from collections.abc import Iterator

import pytest

from cache_pool import TOKENS, CachePool, until
from dashboard_rig import check_against_docs
from engine_process import PATIENCE_S, EngineProcess, engine_process
from otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from promtool import check_page

CLIENT = "00f067aa0ba902b7"
"""The span of whoever asks."""
COLD, WARM, UNSAMPLED, SAID, LAST = (f"{number:032x}" for number in range(1, 6))
NUM_BLOCKS = 4
"""Fewer than `PROMPT` has."""
PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def engine(receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Has answered `PROMPT` twice: from nothing, and from the pool."""
    folder = tmp_path_factory.mktemp("traced")
    traced = {"KVTIER__TRACING__ENDPOINT": receiver.url, "KVTIER__TRACING__SAMPLE_RATIO": "0"}
    table = {"KVTIER__POOL__ADDRESS": f"unix:{folder}/pool.sock", "KVTIER__TENANTS__RED__TOKEN": "env:RED_TOKEN"}
    settings = {"RED_TOKEN": TOKENS["red"], "KVTIER__CACHE__FETCH": "always"} | table
    settings |= {"KVTIER__DISK__DIRECTORY": f"{folder}/disk"}
    with CachePool(folder, TOKENS, **traced) as pool, engine_process(folder, **traced, **settings) as running:
        for trace in (COLD, WARM):
            ask(running, f"00-{trace}-{CLIENT}-01")
            pool.await_written(NUM_BLOCKS)
            running.post("/v1/cache/reset", {})
        yield running


def ask(engine: EngineProcess, traceparent: str | None) -> None:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    answer = engine.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


def whole(receiver: OtlpReceiver, trace: str, *names: str) -> list[ReceivedSpan]:
    """The spans of a trace, when some with these names are among them."""
    until(lambda: {*names} <= {span.name for span in receiver.spans(trace)}, f"{names} came to the collector")
    return receiver.spans(trace)


def parents(spans: list[ReceivedSpan]) -> set[tuple[str, str]]:
    """Each span's name with that of the span that it is in; all but the first are in one, and begin within it."""
    by_id = {span.id: span for span in spans}
    inner = [span for span in spans if span.parent != CLIENT]
    for span in inner:
        assert by_id[span.parent].start_ns <= span.start_ns <= span.end_ns, span.name
    return {(span.name, by_id[span.parent].name) for span in inner}


def one(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


def test_its_metrics_are_those_that_the_docs_tell_of_and_begin_at_0(engine: EngineProcess) -> None:
    check_against_docs(engine.first_page, silent=["kvtier_tier_declined_blocks_total"])
    check_page(engine.first_page)


@pytest.mark.usefixtures("engine")
def test_a_hit_in_the_pool_is_one_trace_of_two_processes(receiver: OtlpReceiver) -> None:
    spans = whole(receiver, WARM, "request", "decode", "pool lookup", "copy to device")
    assert one(spans, "request").parent == CLIENT
    assert parents(spans) >= {
        ("queue", "request"),
        ("lookup", "request"),
        ("lookup pool", "lookup"),
        ("pool lookup", "lookup pool"),
        ("lookup memory", "pool lookup"),
        ("fetch", "request"),
        ("copy to device", "fetch"),
        ("prefill", "request"),
        ("decode", "request"),
    }
    assert {span.service for span in spans} == {"kvtier-engine", "kvtier-pool"}
    assert one(spans, "pool lookup").service == "kvtier-pool"
    assert one(spans, "request").attributes["kvtier.cached_tokens.pool"] > 0
    assert one(spans, "lookup").attributes["kvtier.hits.pool"] == one(spans, "fetch").attributes["kvtier.blocks"]


@pytest.mark.usefixtures("engine")
def test_what_a_request_saves_is_in_its_trace(receiver: OtlpReceiver) -> None:
    spans = whole(receiver, COLD, "request", "write pool", "copy to host")
    assert parents(spans) >= {("copy to host", "request"), ("write pool", "request")}
    assert sum(int(span.attributes["kvtier.stored"]) for span in spans if span.name == "write pool") >= NUM_BLOCKS


def test_who_has_begun_the_trace_decides_and_else_the_ratio(engine: EngineProcess, receiver: OtlpReceiver) -> None:
    num_before = len(receiver.bodies)
    ask(engine, f"00-{UNSAMPLED}-{CLIENT}-00")
    ask(engine, None)
    ask(engine, "no context")
    ask(engine, f"00-{SAID}-{CLIENT}-01")
    whole(receiver, SAID, "request")
    assert not receiver.spans(UNSAMPLED)
    traces = receiver.traces(num_before)
    assert traces <= {COLD, WARM, SAID}


@pytest.mark.usefixtures("engine")
def test_a_collector_hears_nothing_that_is_secret(receiver: OtlpReceiver) -> None:
    whole(receiver, WARM, "request")
    heard = b"".join(receiver.bodies)
    for secret in (b"best of times", b"secret of more", TOKENS["red"].encode(), b"kvtier.tenant"):
        assert secret not in heard


def test_a_collector_that_hangs_holds_up_nobody(engine: EngineProcess, receiver: OtlpReceiver) -> None:
    receiver.may_answer.clear()
    ask(engine, f"00-{LAST}-{CLIENT}-01")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(PATIENCE_S) == 0
