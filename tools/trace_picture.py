"""Draws docs/trace.svg: one request through an engine and a pool, both real, as a collector gets their spans.

python tools/trace_picture.py [docs/trace.svg]
"""

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "rigs"))

from cache_pool import TOKENS, CachePool, until  # noqa: E402
from engine_process import engine_process  # noqa: E402
from otlp_receiver import ReceivedSpan, otlp_receiver  # noqa: E402

CLIENT, TRACE = f"{9:016x}", f"{7:032x}"
PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 12
NUM_BLOCKS = 15
WIDTH, LABELS, ROW, TOP, TOOK = 960, 250, 22, 34, 45
"""Pixels of the picture, its names, a row, what is above the rows, and the words behind a bar."""
FIRST_PART = 0.72
"""The part of the width that is for the time until the prefill: it is short, and what the picture is about."""
COLOURS = {"kvtier-engine": "#3b6ea5", "kvtier-pool": "#c2703d"}


def record() -> list[ReceivedSpan]:
    """Asks once to fill the pool, and once more when the engine has forgotten all; gives the spans of the latter."""
    with TemporaryDirectory() as name, otlp_receiver() as receiver:
        folder = Path(name)
        traced = {"KVTIER__TRACING__ENDPOINT": receiver.url, "KVTIER__TRACING__SAMPLE_RATIO": "0"}
        settings = {
            "RED_TOKEN": TOKENS["red"],
            "KVTIER__POOL__ADDRESS": f"unix:{folder}/pool.sock",
            "KVTIER__TENANTS__RED__TOKEN": "env:RED_TOKEN",
            "KVTIER__CACHE__FETCH": "always",
        }
        with CachePool(folder, TOKENS, **traced) as pool, engine_process(folder, **traced, **settings) as engine:
            for flag in ("00", "00", "01"):
                headers = {"traceparent": f"00-{TRACE}-{CLIENT}-{flag}"}
                body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
                engine.client.post("/v1/completions", json=body, headers=headers).raise_for_status()
                pool.await_written(NUM_BLOCKS)
                engine.post("/v1/cache/reset", {})
            wanted = {"request", "decode", "pool lookup", "copy to device"}
            until(lambda: wanted <= {span.name for span in receiver.spans(TRACE)}, "the spans came")
            return receiver.spans(TRACE)


def rows(spans: list[ReceivedSpan]) -> list[tuple[int, ReceivedSpan]]:
    """Depth and span, each followed by those within it."""
    inner: dict[str, list[ReceivedSpan]] = {}
    for span in spans:
        inner.setdefault(span.parent, []).append(span)

    def below(parent: str, depth: int) -> list[tuple[int, ReceivedSpan]]:
        return [row for span in inner.get(parent, []) for row in ((depth, span), *below(span.id, depth + 1))]

    return below(CLIENT, 0)


def svg(spans: list[ReceivedSpan]) -> str:
    """The waterfall. Time runs in two scales: up to the prefill, and from there on."""
    begun = min(span.start_ns for span in spans)
    ended = max(span.end_ns for span in spans)
    turn = next(span.start_ns for span in spans if span.name == "prefill")
    room = WIDTH - LABELS - 70

    def x(ns: int) -> float:
        if ns <= turn:
            return LABELS + room * FIRST_PART * (ns - begun) / (turn - begun)
        return LABELS + room * (FIRST_PART + (1 - FIRST_PART) * (ns - turn) / (ended - turn))

    drawn, table = [], rows(spans)
    height = TOP + ROW * len(table) + 26
    for tick_ms in ticks((turn - begun) / 1e6):
        at = x(begun + int(tick_ms * 1e6))
        drawn.append(f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{height - 22}" stroke="#ddd"/>')
        drawn.append(f'<text x="{at:.1f}" y="{TOP - 12}" text-anchor="middle" fill="#666">{tick_ms:g} ms</text>')
    for number, (depth, span) in enumerate(table):
        top = TOP + ROW * number
        left, right = x(span.start_ns), max(x(span.end_ns), x(span.start_ns) + 1.5)
        fill = "url(#pool)" if span.service == "kvtier-pool" else COLOURS[span.service]
        drawn.append(f'<text x="{8 + 14 * depth}" y="{top + 15}">{escape(label(span))}</text>')
        drawn.append(
            f'<rect x="{left:.1f}" y="{top + 4}" width="{right - left:.1f}" height="{ROW - 8}" rx="2" fill="{fill}"/>'
        )
        took_ms = (span.end_ns - span.start_ns) / 1e6
        took = f"{took_ms / 1000:.1f} s" if took_ms >= 1000 else f"{took_ms:.{0 if took_ms >= 10 else 2}f} ms"
        is_in_the_way = right < x(turn) < right + TOOK
        at = f'x="{left - 5:.1f}" text-anchor="end"' if is_in_the_way else f'x="{right + 5:.1f}"'
        drawn.append(f'<text {at} y="{top + 15}" fill="#666">{took}</text>')
    at = x(turn)
    drawn.append(
        f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{height - 22}" stroke="#999" stroke-dasharray="4 3"/>'
    )
    times = speed(x, begun, turn, ended)
    legend = f"blue: kvtier-engine; hatched: kvtier-pool; right of the dashed line time runs {times:.0f} times as fast"
    drawn.append(f'<text x="8" y="{height - 6}" fill="#666">{legend}</text>')
    return PAGE.format(width=WIDTH, height=height, colour=COLOURS["kvtier-pool"], body="\n".join(drawn))


def label(span: ReceivedSpan) -> str:
    blocks = span.attributes.get("kvtier.blocks")
    return span.name if blocks is None else f"{span.name}, {blocks} blocks"


def ticks(until_ms: float) -> list[float]:
    step = next(step for step in (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1e9) if until_ms / step <= 8)
    return [number * step for number in range(int(until_ms / step) + 1)]


def speed(x: Callable[[int], float], begun: int, turn: int, ended: int) -> float:
    return (ended - turn) / (x(ended) - x(turn)) / ((turn - begun) / (x(turn) - x(begun)))


PAGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" \
font-family="system-ui, sans-serif" font-size="12">
<defs><pattern id="pool" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<rect width="6" height="6" fill="{colour}"/><rect width="2" height="6" fill="#fff" opacity="0.45"/></pattern></defs>
<rect width="100%" height="100%" fill="#fff"/>
{body}
</svg>
"""

if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "trace.svg"
    target.write_text(svg(record()))
    print(target)
