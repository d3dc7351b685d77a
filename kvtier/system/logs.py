"""How kvtier's processes write their log: one format for all of them, as text or as JSON lines.

A JSON line has `time` (UTC), `level`, `logger`, `message` and `pid`; `peer`, `tenant`, `request_id`, `tier` and
`trace_id` where they are known; and `traceback` where there is one. Secrets never reach a log record: tokens are named
by their ids.
"""

import json
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, TextIO

from kvtier.system.tracing import tracing

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

OURS = ("kvtier", "kvtier_pool", "kvtier_engine", "kvtier_gateway", "kvtier_vllm", "kvtier_sglang", "kvtier_bench")
"""The loggers of our packages."""
_FIELDS = ("peer", "tenant", "request_id", "tier", "trace_id")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_NOTHING: Mapping[str, str] = {}
_NO_REQUEST = nullcontext()
_bound: ContextVar[Mapping[str, str]] = ContextVar("kvtier_log_fields", default=_NOTHING)
"""What all lines of the present thread are about."""


class JsonLines(logging.Formatter):
    """A record as one line of JSON. Any thread."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            **_fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """A record as text, with what the thread's lines are about behind the message. Any thread."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        about = " ".join(f"{name}={value}" for name, value in _about().items())
        return f"{super().formatMessage(record)} [{about}]" if about else super().formatMessage(record)


def bind_log_fields(**fields: str) -> None:
    """All lines that this thread (or task) logs from now on have these fields, and no others; less than a microsecond.

    :param fields: of `peer`, `tenant`, `request_id` and `tier`. Never a secret.
    """
    _bound.set(fields)


def add_log_fields(**fields: str) -> None:
    """All lines that this thread (or task) logs from now on have these fields, too.

    :param fields: as those of `bind_log_fields`.
    """
    _bound.set({**_bound.get(), **fields})


@contextmanager
def log_fields(**fields: str) -> Iterator[None]:
    """Lines that this thread (or task) logs meanwhile have these fields, too; a microsecond.

    :param fields: as those of `bind_log_fields`.
    """
    before = _bound.set({**_bound.get(), **fields})
    try:
        yield
    finally:
        _bound.reset(before)


def current_request_id() -> str:
    """The id of the request that the calling thread works for, to be handed on to other threads and processes; empty:
    it works for none, or for several."""
    return _bound.get().get("request_id", "")


def within_request(request_id: str) -> AbstractContextManager[None]:
    """Lines that the calling thread logs meanwhile are about this request; an empty id changes nothing."""
    return log_fields(request_id=request_id) if request_id else _NO_REQUEST


def set_up_logs(level: Level | int | None = None, format: Format | None = None, stream: TextIO | None = None) -> None:
    """Sends all that this process logs to standard error, whatever was set up before. For processes that are ours.

    As JSON, what ends a thread is a line, too; as text, Python writes its traceback as it always does.
    Packages of others log from INFO on, or from `level` where that is higher: their debug lines may hold secrets.

    :param level: of kvtier's own lines; None: `info`.
    :param format: None: `text`.
    """
    own = level if isinstance(level, int) else int(getattr(logging, (level or "info").upper()))
    handler = _handler(format or "text", stream)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(own, logging.INFO))
    for name in OURS:
        logging.getLogger(name).setLevel(own)
    logging.captureWarnings(True)
    if format == "json":
        sys.excepthook, threading.excepthook = _log_uncaught, _log_uncaught_of


def set_up_logs_within(level: Level | None, format: Format | None, names: Iterable[str] = OURS) -> None:
    """Changes what is set, for the loggers of our packages alone. For processes of an engine that kvtier is a plug-in
    of; without settings its own way of logging stays."""
    handler = None if format is None else _handler(format, None)
    for name in names:
        logger = logging.getLogger(name)
        if level is not None:
            logger.setLevel(level.upper())
        if handler is not None:
            logger.handlers[:], logger.propagate = [handler], False


def effective_level() -> int:
    """The level from which on kvtier's own lines are logged in this process."""
    return logging.getLogger(OURS[0]).getEffectiveLevel()


def log_fatal(message: str) -> bool:
    """Logs why the process ends, where its log is JSON lines; False: it is not, and nothing was written."""
    is_json = any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)
    if is_json:
        logging.getLogger(OURS[0]).critical("%s", message)
    return is_json


def _handler(format: Format, stream: TextIO | None) -> logging.Handler:
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    return handler


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Stands in the place of `sys.excepthook`."""
    _log_end_of("main", error)


def _log_uncaught_of(ended: threading.ExceptHookArgs) -> None:
    """Stands in the place of `threading.excepthook`."""
    if ended.exc_type is not SystemExit:  # which ends a thread in silence
        name = ended.thread.name if ended.thread is not None else "unknown"
        _log_end_of(name, ended.exc_value)


def _log_end_of(thread: str, error: BaseException | None) -> None:
    logging.getLogger(OURS[0]).critical("an exception that nothing caught ended thread %s", thread, exc_info=error)


def _about() -> Mapping[str, str]:
    """What the lines of the present thread are about: what was bound, and the trace that it works within."""
    context = tracing.context()
    return {**_bound.get(), "trace_id": context[3:35]} if context else _bound.get()


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What is known of the line beside its message: what the record was given wins over what the thread is bound to."""
    about = _about()
    known = {name: getattr(record, name, about.get(name)) for name in _FIELDS}
    return {name: value for name, value in known.items() if value is not None}
