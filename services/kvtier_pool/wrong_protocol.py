"""Answers to peers that speak another protocol than this port does, in their own words."""

import struct

from kvtier.net.wrong_protocol import http_refusal

_HINT = "this is kvtier's block protocol; gRPC is at the address `grpc_listen`, HTTP at `http_listen`"
_HTTP2_SETTINGS, _HTTP2_GOAWAY = 4, 7
_HTTP2_PROTOCOL_ERROR = 1


def answer_for(first: bytes) -> bytes | None:
    """What to send to a peer whose first bytes were these; None for those we know no words for."""
    if first.startswith(b"PRI "):
        goaway = struct.pack(">II", 0, _HTTP2_PROTOCOL_ERROR) + _HINT.encode()
        return _http2_frame(_HTTP2_SETTINGS, b"") + _http2_frame(_HTTP2_GOAWAY, goaway)
    if first.startswith((b"GET ", b"POST", b"HEAD", b"PUT ")):
        return http_refusal(_HINT)
    return None


def _http2_frame(kind: int, payload: bytes) -> bytes:
    """A frame of stream 0 without flags."""
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + bytes(4) + payload
