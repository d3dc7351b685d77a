"""A collector of OpenTelemetry's: takes spans over OTLP/HTTP, as protobuf, and keeps them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import decompress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it came."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    """Empty: it has none."""
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int]


class OtlpReceiver:
    """Any thread."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[bytes] = []
        self.may_answer = threading.Event()
        """Cleared: it takes connections and answers nobody."""
        self.may_answer.set()

    def spans(self, trace: str) -> list[ReceivedSpan]:
        """What has come of a trace, in the order in which it began."""
        found = [span for body in list(self.bodies) for span in _spans_in(body) if span.trace == trace]
        return sorted(found, key=lambda span: span.start_ns)

    def traces(self, first_body: int) -> set[str]:
        """The traces that something has come of since there were so many bodies."""
        return {span.trace for body in self.bodies[first_body:] for span in _spans_in(body)}


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Listens until the context is left."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.may_answer.wait()
            receiver.bodies.append(decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _spans_in(body: bytes) -> Iterator[ReceivedSpan]:
    for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = next(
            each.value.string_value for each in of_resource.resource.attributes if each.key == "service.name"
        )
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield ReceivedSpan(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    {each.key: each.value.string_value or each.value.int_value for each in span.attributes},
                )
