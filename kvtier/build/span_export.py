"""Hands the spans of this process to an OpenTelemetry collector. The only module that imports OpenTelemetry."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtier.config import Config
from kvtier.errors import ConfigError
from kvtier.system.quiet_log import QuietLog
from kvtier.system.tracing import Span, tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_MOST_WAITING = 4096
"""Spans that wait for the collector; beyond, the oldest are dropped."""
_BATCH, _EVERY_MS = 512, 1000
_TIMEOUT_S = 5.0
"""Seconds for one batch, with all attempts."""
_LAST_S = 2.0
"""What the spans of the last second get at the end of the process."""
_log = logging.getLogger(__name__)


@contextmanager
def exporting_spans(config: Config, service_name: str) -> Iterator[None]:
    """Exports the spans of this process until the context is left, as `[tracing]` says; without an endpoint, there are
    none. Neither requests nor the end of the process wait for a collector.

    :param service_name: what the process is called unless the configuration names it.
    :raises ConfigError: OpenTelemetry is not installed.
    """
    table = config.tracing
    if table.endpoint is None or tracing.is_on:  # two halves of an engine may share a process
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "tracing.endpoint: needs OpenTelemetry: in a checkout of kvtier, pip install '.[otel]'"
        ) from error
    exporter = OTLPSpanExporter(endpoint=f"{table.endpoint.rstrip('/')}/v1/traces", timeout=_TIMEOUT_S)
    with _exporting(exporter, table.service_name or service_name, config):
        yield


@contextmanager
def _exporting(exporter: "SpanExporter", service_name: str, config: Config) -> Iterator[None]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # It logs each batch that was not taken, every second.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    resource = Resource({"service.name": service_name})
    processor = BatchSpanProcessor(
        _told_of_failures(exporter, config.tracing.endpoint or ""),
        max_queue_size=_MOST_WAITING,
        schedule_delay_millis=_EVERY_MS,
        max_export_batch_size=_BATCH,
    )
    tracing.start(
        lambda span: processor.on_end(_readable(span, resource)),
        sample_ratio=config.tracing.sample_ratio,
        names_tenants=config.tracing.tenant_names,
    )
    try:
        yield
    finally:
        tracing.stop()
        last = threading.Thread(target=processor.shutdown, name="kvtier-last-spans", daemon=True)
        last.start()
        last.join(_LAST_S)


def _told_of_failures(exporter: "SpanExporter", endpoint: str) -> "SpanExporter":
    """The exporter; it logs now and then that a collector takes no spans."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    log = QuietLog(_log)

    class ToldOfFailures(SpanExporter):
        def export(self, spans: "list[ReadableSpan]") -> SpanExportResult:  # type: ignore[override]
            try:
                result = exporter.export(spans)
            except Exception as error:
                log.warning(f"{len(spans)} spans are lost: {endpoint}: {error}")
                return SpanExportResult.FAILURE
            if result is not SpanExportResult.SUCCESS:
                log.warning(f"{len(spans)} spans are lost: {endpoint} does not take them; is an OTLP collector there?")
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return ToldOfFailures()


def _readable(span: Span, resource: object) -> "ReadableSpan":
    """The span as OpenTelemetry's SDK has it at its end."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(text: str, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(int(text[3:35], 16), int(text[36:52], 16), is_remote, TraceFlags(TraceFlags.SAMPLED))

    return ReadableSpan(
        span.name,
        context=context(span.context),
        parent=context(span.parent, is_remote=span.answers_a_client) if span.parent else None,
        resource=resource,  # type: ignore[arg-type]
        attributes={f"kvtier.{name}": value for name, value in span.attributes.items()},
        events=[Event(name, timestamp=ns) for name, ns in span.events],
        kind=SpanKind.SERVER if span.answers_a_client else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR if span.has_failed else StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
    )
