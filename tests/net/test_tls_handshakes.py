"""What handshakes of TLS accept, told by both ends in memory: names of certificates, and sessions of before."""

import ssl
from pathlib import Path

import pytest

from certificates import Authority
from kvtier.net.certificates import TlsFiles, client_context, server_context

NAME = "pool.example"


class Ends:
    """The contexts of a server whose certificate has these names, and of a client that knows its CA."""

    def __init__(self, folder: Path, *identities: str) -> None:
        authority = Authority(folder)
        pair = authority.issue("server", *identities, common_name=NAME)
        self.server = server_context(TlsFiles(certificate=pair.certificate, key=pair.key))
        self.client = client_context(TlsFiles(ca=authority.certificate))

    def shake_hands(self, session: ssl.SSLSession | None = None) -> ssl.SSLObject:
        """Returns the client's end after the handshake. Raises what the client's end raises."""
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self.server.wrap_bio(to_server, to_client, server_side=True)
        client = self.client.wrap_bio(to_client, to_server, server_hostname=NAME, session=session)
        left = [client, server]
        while left:
            for end in list(left):
                try:
                    end.do_handshake()
                    left.remove(end)
                except ssl.SSLWantReadError:
                    continue
        return client


def test_a_server_is_known_by_its_alternative_names(tmp_path: Path) -> None:
    assert Ends(tmp_path, NAME).shake_hands().getpeercert()


def test_a_common_name_is_no_name_of_a_server(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        Ends(tmp_path).shake_hands()


def test_sessions_of_tls_1_2_are_not_resumed(tmp_path: Path) -> None:
    ends = Ends(tmp_path, NAME)
    ends.client.maximum_version = ssl.TLSVersion.TLSv1_2
    first = ends.shake_hands()
    assert first.version() == "TLSv1.2"
    assert first.session is not None
    assert not first.session.has_ticket
    assert not ends.shake_hands(first.session).session_reused
