"""`kvtier tenants`, against pools that run: what it shows, what it writes, and what the pool makes of it."""

import io
import json
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from configured_pool import NEW, OLD, OTHER, configuration, digest, is_let_in, running
from kvtier.errors import ConfigError
from kvtier.identity.keys import tenant_id
from kvtier.tiers.base import Status, WriteStatus
from kvtier_pool.credential_file import CredentialFile
from kvtier_pool.tenants_command import table_of
from pool_rig import BLOCK_BYTES, MIB, WAIT_S, connect, items, keys, until

COMMAND = [sys.executable, "-c", "from kvtier_pool.tenants_command import app; app(prog_name='kvtier tenants')"]


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False)
    return ended.returncode, ended.stdout, ended.stderr


def token_in(output: str) -> str:
    (token,) = re.fullmatch(r"KVTIER_TOKEN=([0-9a-f]{64})\n", output).groups()  # type: ignore[union-attr]
    return str(token)


def test_a_tenant_is_added_rotated_and_revoked_while_the_pool_runs(tmp_path: Path) -> None:
    path = configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')
    path.write_text("# A comment that stays.\n" + path.read_text())
    path.chmod(0o640)
    with running(path) as pool:
        where = ("--config", str(path), "--pid", str(pool.service.process.pid))
        code, out, err = run("add", "green", *where)
        assert (code, "The pool has read its file." in err) == (0, True), err
        first = token_in(out)
        assert is_let_in(pool, first, "green")
        code, out, err = run("rotate", "green", *where, "--overlap-s", "3600")
        second = token_in(out)
        assert is_let_in(pool, first, "green")
        assert is_let_in(pool, second, "green")
        said = f"the engines of green within 3,600 s: after that, {digest(first)[:8]} is no longer accepted."
        assert said in err
        code, out, err = run("revoke", "green", digest(first)[:8], *where)
        assert (code, out) == (0, "")
        assert not is_let_in(pool, first, "green")
        assert is_let_in(pool, second, "green")
        assert run("revoke", "green", *where)[0] == 0
        assert not is_let_in(pool, second, "green")
        text = path.read_text()
        assert text.startswith("# A comment that stays.\n")
        assert first not in text + pool.log.read_text()
        assert second not in text + pool.log.read_text()
        assert tomllib.loads(text)["tenants"]["green"] == {"token_sha256": []}
        assert path.stat().st_mode & 0o777 == 0o640
        assert [file.name for file in tmp_path.iterdir() if "pool.toml" in file.name] == ["pool.toml"]


def test_what_the_command_lists(tmp_path: Path) -> None:
    quota = '[tenants.red.memory]\ncap_bytes = "8MiB"\n'
    tokens = f'"{digest(OLD)}", {{sha256 = "{digest(NEW)}", expires_at = "2020-01-01T00:00:00Z"}}'
    with running(configuration(tmp_path / "pool.toml", tokens, quota)) as pool:
        tier = connect(pool.block, token=OLD)
        assert tier.write(items(range(200)))[-1] in (WriteStatus.STORED, WriteStatus.FULL)
        buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(200)]
        statuses = tier.read(keys(range(200)), buffers)
        assert tier.lookup(keys(range(200, 210))) == [Status.MISS] * 10
        tier.close()
        pid = str(pool.service.process.pid)
        code, out, err = run("list", "--pid", pid, "--json")
        assert code == 0, err
        report = json.loads(out)
        red, blue = report["tenants"]["red"], report["tenants"]["blue"]
        num_hits = statuses.count(Status.HIT)
        assert (red["num_hits"], red["num_misses"]) == (num_hits, 200 - num_hits + 10)
        assert red["tiers"]["memory"] == {"num_blocks": num_hits, "used_bytes": num_hits * BLOCK_BYTES}
        assert red["quota"]["memory"]["cap_bytes"] == 8 << 20
        assert (blue["num_hits"], blue["tiers"]["memory"]["num_blocks"]) == (0, 0)
        code, out, _ = run("list", "--pid", pid)
        assert re.search(rf"^\s*red .*{num_hits}.* 1\s*$", out, re.MULTILINE), "one token has expired"
        code, _, err = run("purge", "rde", "--pid", pid, "--yes")
        assert (code, "No tenant rde is configured, and nothing was left of one" in err) == (0, True), err


def test_a_purge_that_a_stopped_pool_is_asked_for_is_given_up_and_never_begins(tmp_path: Path) -> None:
    command = (
        "from kvtier_pool import operator_client, tenants_command; operator_client._ANSWER_S = 1.0; "
        "tenants_command.app(prog_name='kvtier tenants')"
    )
    with running(configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')) as pool:
        process = pool.service.process
        process.send_signal(signal.SIGSTOP)
        try:
            ended = subprocess.run(
                [sys.executable, "-c", command, "purge", "red", "--yes", "--pid", str(process.pid)],
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
        finally:
            process.send_signal(signal.SIGCONT)
        assert ended.returncode == 1
        assert "the pool says nothing any more" in ended.stderr
        assert "has not begun the purge, and does not begin it later" in ended.stderr
        pool.says("has gone: the purge of tenant 'red' is not begun")
        assert '"event": "purge"' not in pool.log.read_text()


def test_a_cap_that_is_lowered_on_sighup_takes_what_the_tenant_has_above_it(tmp_path: Path) -> None:
    path, caps = tmp_path / "pool.toml", "".join(f'[tenants.red.{t}]\ncap_bytes = "4MiB"\n' for t in ("memory", "disk"))

    def configured(quota: str = "") -> None:
        text = configuration(path, f'"{digest(OLD)}"', quota).read_text()
        path.write_text(
            text.replace("memory_bytes", f'disk_dir = "{tmp_path}/disk"\ndisk_bytes = "64MiB"\nmemory_bytes')
        )

    def used_bytes(tenant: str) -> dict[str, int]:
        report = json.loads(run("list", "--pid", str(pool.service.process.pid), "--json")[1])
        return {tier: figures["used_bytes"] for tier, figures in report["tenants"][tenant]["tiers"].items()}

    configured()
    with running(path) as pool, ExitStack() as stack:
        red, blue = connect(pool.block, token=OLD), connect(pool.block, "blue", token=OTHER)
        stack.callback(red.close)
        stack.callback(blue.close)
        assert set(blue.write(items(range(32), tenant_id("blue")))) == {WriteStatus.STORED}
        for first in range(0, 256, 16):
            assert set(red.write(items(range(first, first + 16)))) == {WriteStatus.STORED}
        until(lambda: used_bytes("red")["disk"] > 256 * BLOCK_BYTES and used_bytes("blue")["disk"] > 32 * BLOCK_BYTES)
        before = used_bytes("blue")
        configured(caps)
        pool.service.process.send_signal(signal.SIGHUP)
        until(lambda: max(used_bytes("red").values()) <= 4 * MIB)
        assert set(red.write(items(range(256, 272)))) == {WriteStatus.STORED}
        assert red.lookup(keys(range(256, 272))) == [Status.HIT] * 16
        assert used_bytes("blue") == before


def test_the_list_fits_80_columns_whatever_a_tenant_has() -> None:
    def figures(count: int, nbytes: int) -> dict[str, Any]:
        counts = ("num_hits", "num_misses", "num_evicted", "num_full", "num_throttled", "num_refused")
        tier = {"used_bytes": nbytes, "num_blocks": count}
        return {"tiers": {"memory": tier, "disk": tier}, "tokens": [], **dict.fromkeys(counts, count)}

    tenants = {
        "a-tenant-with-a-name-of-forty-characters": figures(123_456_789_012, 1023 * 2**40),
        "small": figures(9_999, 2**20 + 2**19),
        "none": figures(0, 0),
    }
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table_of(tenants))
    lines = console.export_text().splitlines()
    assert [line.split()[1:] for line in lines[2:]] == [
        ["1.5", "MiB", "1.5", "MiB", *["9,999"] * 4, "20k", "9,999", "0"],
        ["0", "B", "0", "B", *["0"] * 7],
    ]
    assert lines[1].split()[1:] == ["1023", "TiB", "1023", "TiB", *["123G"] * 4, "247G", "123G", "0"]
    assert lines[1].startswith("a-te")
    assert max(map(len, lines)) <= 80


def test_a_recording_does_not_keep_the_pool_from_other_operators(tmp_path: Path) -> None:
    with running(configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')) as pool:
        pid = str(pool.service.process.pid)
        trace = [sys.executable, "-c", "from kvtier_pool.trace_command import app; app()", "record"]
        with subprocess.Popen(
            [*trace, str(tmp_path / "trace"), "--pid", pid], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("recording to")
            assert run("list", "--pid", pid)[0] == 0
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "red"), "tenants.red is there already"),
        (("add", "Red!"), "use 1 to 63"),
        (("rotate", "redd"), "did you mean 'red'"),
        (("revoke", "red", "00000000"), "has no token '00000000'"),
        (("rotate", "red", "--overlap-s", "1e12"), "--overlap-s 1e+12: no calendar has such a date"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    path = configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')
    before = path.read_text()
    code, out, err = run(*arguments, "--config", str(path))
    assert (code != 0, out, path.read_text()) == (True, "", before)
    assert message in err


def test_tenants_of_the_environment_alone_cannot_be_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER__TENANTS__GREEN__TOKEN_SHA256", f'["{digest(NEW)}"]')
    path = configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')
    for arguments in (("rotate", "green"), ("revoke", "green")):
        code, out, err = run(*arguments, "--config", str(path))
        assert (code != 0, out) == (True, "")
        assert "ConfigError" in err
        assert "tenants.green is not there" in err
    monkeypatch.setenv("KVTIER__TENANTS__RED__TOKEN_SHA256", f'["{digest(NEW)}", "{digest("another-one")}"]')
    assert CredentialFile(path).remove_tokens("red", None) == [digest(OLD)[:8]]


def test_an_edit_keeps_the_rest_and_tokens_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    (tmp_path / "red.sha256").write_text(digest(NEW))
    red = '[tenants.red]\ntoken_sha256 = [\n  "env:NOT_HERE",  # the old one\n{}]\nsalt = "x"  # kept\n'
    path.write_text(red.format('  "file:red.sha256",\n'))
    file = CredentialFile(path)
    assert [token for token, _ in file.tokens("red")] == ["env:NOT_HERE", digest(NEW)[:8]]
    assert file.remove_tokens("red", digest(NEW)[:8]) == [digest(NEW)[:8]]
    file.save()
    assert (
        path.read_text() == '[tenants.red]\ntoken_sha256 = [\n  "env:NOT_HERE",  # the old one\n]\nsalt = "x"  # kept\n'
    )
    with pytest.raises(ConfigError, match="cannot read"):
        CredentialFile(tmp_path / "nowhere.toml")
    path.write_text(
        'tenant = "red"\n[tenants.red]\nsecret = "env:S"\ntoken = "env:T"\n[pool]\naddress = "127.0.0.1:1"\n'
    )
    with pytest.raises(ConfigError, match=r"not a pool's file: .*add \[pool_service\]"):
        CredentialFile(path)


def test_two_who_edit_at_once_lose_nothing_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(f"[pool_service]\n[tenants.old]\ntoken_sha256 = ['{'0' * 64}']\n")
    first, second = CredentialFile(path), CredentialFile(path)
    first.add_tenant("red", "1" * 64)
    second.add_tenant("green", "2" * 64)
    first.save()
    with pytest.raises(ConfigError, match="somebody else has changed it meanwhile; run this command again"):
        second.save()
    assert "[tenants.red]" in path.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["pool.toml"]
