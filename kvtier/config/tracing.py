"""The table of traces."""

from typing import Annotated

from pydantic import AfterValidator, Field

from kvtier.config.fields import Section, checked_url


def _checked_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r}: use the URL of a collector that takes OTLP over HTTP, e.g. http://127.0.0.1:4318")
    return checked_url(text, "export OTEL_EXPORTER_OTLP_HEADERS=authorization=...")


class TracingConfig(Section):
    """Spans of requests, for OpenTelemetry. Needs `kvtier[otel]`."""

    endpoint: Annotated[str, AfterValidator(_checked_url)] | None = None
    """The URL of an OTLP collector, over HTTP, e.g. `http://127.0.0.1:4318`; spans go to `/v1/traces` below it.
    Without, there are no spans, and OpenTelemetry is not imported. A collector that fails or hangs loses spans, and
    nobody waits for it."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The part of requests that become traces, of those that come without a `traceparent` header; with one, its
    sampled flag decides. A pool has spans of the requests whose engine has chosen them. Large: some 20 spans a
    request; what the collector does not take in time is dropped."""
    service_name: str | None = None
    """The name of this process in traces. Without: `kvtier-engine`, `kvtier-pool`, `kvtier-vllm` or `kvtier-sglang`."""
    tenant_names: bool = False
    """Whether spans name the tenant. A reader of the traces then sees who asks how much, and when."""
