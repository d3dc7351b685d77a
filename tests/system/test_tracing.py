"""Contexts and spans: who decides, what is within what, and that nothing happens where nobody listens."""

import subprocess
import sys
import threading

import pytest

from kvtier.system.tracing import NO_CONTEXT, Span, Tracing, is_context

PARENT = f"00-{7:032x}-{9:016x}-01"


def _started(sample_ratio: float = 1.0) -> tuple[Tracing, list[Span]]:
    tracing, ended = Tracing(), list[Span]()
    tracing.start(ended.append, sample_ratio=sample_ratio, names_tenants=False)
    return tracing, ended


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (PARENT, True),
        (PARENT.replace("00-", "cc-", 1) + "-more", True),
        (PARENT.replace("00-", "ff-", 1), False),
        (PARENT.upper().replace("00", "0A", 1), False),
        (f"00-{0:032x}-{9:016x}-01", False),
        (f"00-{7:032x}-{0:016x}-01", False),
        (PARENT[:-1], False),
        (PARENT + "-" + "x" * 1000, False),
        ("", False),
    ],
)
def test_what_is_a_context(text: str, is_one: bool) -> None:
    assert is_context(text) is is_one


def test_the_header_decides_and_without_one_the_ratio() -> None:
    for ratio in (0.0, 1.0):
        tracing, _ = _started(ratio)
        assert tracing.sampled(PARENT) == PARENT
        assert tracing.sampled(PARENT[:-2] + "00") is None
        for without in (None, "no context"):
            assert tracing.sampled(without) == (NO_CONTEXT if ratio else None)
    assert Tracing().sampled(PARENT) is None, "tracing is off"


def test_spans_are_within_each_other_and_threads_within_nothing() -> None:
    tracing, ended = _started()
    seen = []
    with tracing.within(PARENT), tracing.span("outer", blocks=2) as outer, tracing.span("inner") as inner:
        assert outer is not None
        assert inner is not None
        assert tracing.context() == inner.context
        thread = threading.Thread(target=lambda: seen.append(tracing.context()))
        thread.start()
        thread.join()
    assert tracing.context() == NO_CONTEXT
    assert seen == [NO_CONTEXT]
    assert [(span.name, span.parent) for span in ended] == [("inner", outer.context), ("outer", PARENT)]
    assert {span.context[3:35] for span in ended} == {PARENT[3:35]}
    assert all(span.start_ns <= span.end_ns and is_context(span.context) for span in ended)


def test_a_failure_ends_the_span_and_is_said_there() -> None:
    tracing, ended = _started()
    with pytest.raises(RuntimeError), tracing.within(PARENT), tracing.span("read"):
        raise RuntimeError
    assert [span.has_failed for span in ended] == [True]


def test_without_a_context_there_are_no_spans() -> None:
    tracing, ended = _started()
    with tracing.span("read") as span:
        assert span is None
    tracing.stop()
    with tracing.within(PARENT), tracing.span("read") as span:
        assert span is None, "tracing is off"
        assert tracing.context() == PARENT, "for other processes"
    assert not ended


def test_opentelemetry_is_not_imported_where_there_is_no_endpoint() -> None:
    code = """
import sys
from kvtier.build.span_export import exporting_spans
from kvtier.config import parse_config
with exporting_spans(parse_config({}, source="", environ={}), "test"):
    assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
