"""`kvtier doctor`, and set-ups for it."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from configured_pool import digest
from kvtier.cli.app import make_app

SECRET, TOKEN = "a-secret-that-nobody-may-see", "a-token-that-nobody-may-see"
HTTP = "http_listen = '127.0.0.1:0'\n"
PASSWORD = "a-password-that-nobody-may-see"
HIDDEN = {"THE_SECRET": SECRET, "THE_TOKEN": TOKEN, "THE_PASSWORD": PASSWORD}


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor has said."""

    code: int
    lines: list[dict[str, str]]

    def problems(self) -> list[str]:
        return self.of("problem")

    def of(self, level: str) -> list[str]:
        return [" | ".join(list(line.values())[1:]) for line in self.lines if line["level"] == level]

    def tells(self, *parts: str, level: str = "problem") -> None:
        """One line of this level has all of these parts, and some remedy."""
        found = [text for text in self.of(level) if all(part in text for part in parts)]
        assert found, self.lines
        assert level != "problem" or self.code == 1


def run(file: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own."""
    command = [sys.executable, "-m", "kvtier.cli.main", "doctor", "--config", str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=_environ({}), timeout=60, check=False)
    require_harmless(done.stdout + done.stderr)
    return done


def diagnosed(file: Path, **environ: str) -> Diagnosis:
    """In this process, which takes a tenth of the time."""
    said = io.StringIO()
    with mock.patch.dict(os.environ, _environ(environ), clear=True), contextlib.redirect_stdout(said):
        code = make_app()(["doctor", "--config", str(file), "--json"], standalone_mode=False)
    return _read(said.getvalue(), code or 0)


def diagnosed_as(user: int, file: Path) -> Diagnosis:
    """As another user, whom this one becomes when everything is imported: others may not enter its folders."""
    command = [sys.executable, "-c", _AS_ANOTHER, str(user), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environ({}), timeout=60, check=False)
    assert not done.stderr
    return _read(done.stdout, done.returncode)


_AS_ANOTHER = """
import os, pwd, sys
from importlib.metadata import entry_points
from kvtier.cli.main import main
for group in ("kvtier.commands", "kvtier.doctor_looks", "kvtier.config_checks"):
    for entry in entry_points(group=group):
        entry.load()
user = int(sys.argv[1])
os.setgroups([]); os.setgid(user); os.setuid(user)
sys.argv[1:] = ["doctor", "--config", sys.argv[2], "--json"]
main()
"""


def require_harmless(said: str) -> None:
    """No secret is in it, and no traceback."""
    assert not [secret for secret in HIDDEN.values() if secret in said]
    assert "Traceback" not in said


def _environ(more: Mapping[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER__")}
    return {**clean, **HIDDEN, **more}


def _read(said: str, code: int) -> Diagnosis:
    require_harmless(said)
    answer = json.loads(said)
    assert answer["ok"] is (code == 0)
    return Diagnosis(code, answer["lines"])


def engine_file(folder: Path, address: str | list[str], more: str = "") -> Path:
    """An engine's of tenant red. `more` begins with keys of `[pool]`."""
    file = folder / "engine.toml"
    file.write_text(
        "tenant = 'red'\n[tenants.red]\nsecret = 'env:THE_SECRET'\ntoken = 'env:THE_TOKEN'\n"
        f"[pool]\naddress = {json.dumps(address)}\n{more}"
    )
    return file


def pool_file(folder: Path, more: str = "", *, listen: str = "127.0.0.1:0", name: str = "pool.toml") -> Path:
    """A pool's, which lets that engine in. `more` are keys of `[pool_service]`."""
    memory = "" if "memory_bytes" in more else "memory_bytes = '32MiB'\n"
    file = folder / name
    file.write_text(
        f"[tenants.red]\ntoken_sha256 = ['{digest(TOKEN)}']\n[pool_service]\nlisten = ['{listen}']\n"
        f"grpc_listen = ['127.0.0.1:0']\n{'' if 'http_listen' in more else HTTP}{memory}{more}"
    )
    return file
