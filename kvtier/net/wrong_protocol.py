"""Peers that speak another protocol than the one expected, told by the first bytes that they send."""

from kvtier.errors import InvalidInputError

BLOCK_MAGIC = b"KVTF"
"""The first bytes of every frame of the block protocol."""
PRELUDE_BYTES = 16
"""Bytes before the header of a frame of the block protocol; enough to tell it from other protocols."""


class WrongProtocolError(InvalidInputError):
    """The peer does not speak this protocol at all; the message names what it seems to speak."""

    def __init__(self, first: bytes, expected: str = "the block protocol") -> None:
        """
        :param first: the first bytes that came from it.
        :param expected: what is spoken here.
        """
        guess = _guess(first)
        super().__init__(f"not {expected}: {guess or f'it begins with {first[:4]!r}'}")
        self.first = first
        self.is_strange = guess is None
        """Whether the message cannot say what it speaks, nor what to do."""


def http_refusal(hint: str) -> bytes:
    """An answer to whatever an HTTP client has asked for."""
    body = f"{hint}\n"
    return f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


def _guess(first: bytes) -> str | None:
    """What it seems to speak, and what to do; None of what is none of ours."""
    if first.startswith(b"PRI ") or (first[:2] == b"\0\0" and first[3:5] == b"\x04\0"):
        return "this looks like gRPC; the pool's gRPC port is `grpc_listen`, engines name it `grpc:host:port`"
    if first.startswith((b"HTTP", b"GET ", b"POST", b"HEAD", b"PUT ")):
        return "this looks like HTTP; the pool's HTTP port is `http_listen`, its block port `listen`"
    if first.startswith((b"\x16\x03", b"\x15\x03")):
        return (
            "this looks like TLS, which only one side speaks: set `tls_ca` in the engine's [pool] and "
            "`tls_certificate` and `tls_key` in the pool's [pool_service], or none of them"
        )
    if first.startswith(BLOCK_MAGIC):
        return "this looks like kvtier in the clear: set `tls_ca` in the engine's [pool]"
    return None
