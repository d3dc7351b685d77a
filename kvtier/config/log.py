"""The table of what processes log."""

from typing import Literal

from kvtier.config.fields import Section


class LogConfig(Section):
    """How pool, engine and the process of slow tiers log, to standard error."""

    level: Literal["debug", "info", "warning", "error"] | None = None
    """The level from which on kvtier's own lines are logged. Without it `info` in kvtier's own processes, and the
    engine's level in vLLM and SGLang. With `error`, nothing tells that blocks miss because a tier is left alone."""
    format: Literal["text", "json"] | None = None
    """`json` writes an object a line: `time`, `level`, `logger`, `message`, `pid`, and where they are known `peer`,
    `tenant`, `request_id` (an engine's), `tier` and `trace_id`. Without it `text` in kvtier's own processes, and the
    engine's own format in vLLM and SGLang, whose process of slow tiers then logs text."""
