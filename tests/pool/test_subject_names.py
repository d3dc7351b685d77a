"""Names read from a certificate's DER: those that are in it, whole, and never an exception."""

import ssl
from pathlib import Path

from certificates import Authority
from kvtier_pool.subject_names import names_in

NAMES = ["a.example", "spiffe://site.example/red", f"{'long.' * 40}example", "cut.example\0.not.example"]


def issued(folder: Path, *names: str) -> str:
    return Authority(folder).issue("some", *names).certificate.read_text()


def test_names_are_whole_and_of_their_kinds(tmp_path: Path) -> None:
    assert names_in(issued(tmp_path, *NAMES, "127.0.0.1")) == frozenset(NAMES)
    assert names_in(issued(tmp_path, *(f"host-{i}.example" for i in range(500)))) == {
        f"host-{i}.example" for i in range(500)
    }
    assert names_in(issued(tmp_path)) == frozenset()


def test_damage_gives_no_exception(tmp_path: Path) -> None:
    der = ssl.PEM_cert_to_DER_cert(issued(tmp_path, *NAMES))
    for at in range(len(der)):
        for damaged in (der[:at], der[:at] + bytes([der[at] ^ 0x81]) + der[at + 1 :], der[:at] + b"\0" + der[at + 1 :]):
            assert isinstance(names_in(ssl.DER_cert_to_PEM_cert(damaged)), frozenset)
    assert names_in("no certificate") == frozenset()
