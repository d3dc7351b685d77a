"""Reads the single values in the header of a GGUF file, of version 2 or 3.

Lists are skipped: a vocabulary is one of them, and the package `gguf` takes seconds for it.
"""

import mmap
import struct
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.identity.gguf_file import torn

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of numbers, and how `struct` names them."""
_STRING, _LIST = 8, 9
_ALIGNMENT = 32
"""What the tensors' data is aligned to, in bytes, where the header names nothing else."""

Value = str | int | float | bool


def read_gguf_header(path: Path) -> dict[str, Value]:
    """Returns strings and numbers by their names; lists are left out. Takes some milliseconds.

    :raises ConfigError: the file cannot be read as GGUF, or ends before the data of a tensor begins.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).values()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}; name a file that is there") from error
    except (ValueError, KeyError, ArithmeticError, RecursionError, struct.error) as error:
        raise torn(path) from error


class _Header:
    """Reads on from where it is. One thread."""

    def __init__(self, data: mmap.mmap) -> None:
        """Raises `ValueError` for what is no GGUF."""
        self._data, self._at = data, len(_MAGIC)
        if data[: len(_MAGIC)] != _MAGIC:
            raise ValueError("no GGUF")
        self._order = "<"
        if not struct.unpack_from("<H", data, self._at)[0]:  # the version's higher half, in files of the other order
            self._order = ">"
        if self._number("I") not in _VERSIONS:
            raise ValueError("an unknown version of GGUF")

    def values(self) -> dict[str, Value]:
        """`struct.error`, `KeyError` or `ValueError`: the file is torn."""
        num_tensors, num_values = self._number("Q"), self._number("Q")
        found: dict[str, Value] = {}
        for _ in range(num_values):
            name, kind = self._string().decode(), self._number("I")
            if kind == _LIST:
                self._skip_list()
            else:
                found[name] = (
                    self._string().decode(errors="replace") if kind == _STRING else self._number(_FORMATS[kind])
                )
        self._require_tensors(num_tensors, int(found.get("general.alignment", _ALIGNMENT)))
        return found

    def _require_tensors(self, num_tensors: int, alignment: int) -> None:
        furthest = 0
        for _ in range(num_tensors):
            self._string()
            num_dimensions = self._number("I")
            self._skip(8 * num_dimensions + 4)
            furthest = max(furthest, self._number("Q"))
        begin = -(-self._at // alignment) * alignment
        if num_tensors and begin + furthest >= len(self._data):
            raise ValueError("the file ends before a tensor")

    def _skip_list(self) -> None:
        kind, length = self._number("I"), self._number("Q")
        if kind in _FORMATS:
            self._skip(length * struct.calcsize(self._order + _FORMATS[kind]))
            return
        step = {_STRING: self._string, _LIST: self._skip_list}[kind]
        for _ in range(length):
            step()

    def _string(self) -> bytes:
        length = self._number("Q")
        begin = self._at
        self._skip(length)
        return self._data[begin : self._at]

    def _skip(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at > len(self._data):
            raise ValueError("the file ends within its header")

    def _number(self, kind: str) -> int:
        (number,) = struct.unpack_from(self._order + kind, self._data, self._at)
        self._at += struct.calcsize(self._order + kind)
        return number  # type: ignore[no-any-return]
