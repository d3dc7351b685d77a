"""Tests who may reach a pool: nobody over a network in the clear, and no other process of its user."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, UnauthenticatedError
from kvtier.net.certificates import TlsFiles
from kvtier.tiers.pool.grpc_transport import GrpcTransport
from kvtier_pool.exposure import require_protected
from pool_rig import TENANTS, TOKENS, WAIT_S, PoolProcess, keys, pool_config, pool_process, running_pool, until

IS_ROOT = os.getuid() == 0
POOL_USER, ENGINE_USER = 65534, 65533
"""Users of the processes, where tests run as root; else all run as the user of the tests."""
PEEK = """
import sys
for what in ("fd", "mem", "environ"):
    try:
        open(f"/proc/{sys.argv[1]}/fd/0", "rb").close() if what == "fd" else open(f"/proc/{sys.argv[1]}/{what}", "rb")
        print("open", end=" ")
    except PermissionError:
        print("closed", end=" ")
"""
ENGINE = """
import sys
from kvtier.identity.keys import tenant_id
from kvtier.metrics import Metrics
from kvtier.testing.contract import make_key, make_payload, summed
from kvtier.tiers.pool.access import PoolAccess, open_transport
address, token = sys.argv[1:]
metrics = Metrics()
transport = open_transport(PoolAccess([address], tenant_id("red"), token), metrics, connect_ahead=False)
key, payload, into = make_key(0, tenant=tenant_id("red")), make_payload(0, 65536), bytearray(65536)
print(*transport.write([summed(key, payload)], 20.0))
print(*transport.read([key], [memoryview(into)], 20.0), into == payload)
for verb in ("write", "read"):
    print(metrics.registry.get_sample_value("kvtier_path_bytes_total", {"path": "shm", "op": verb}))
transport.close()
"""


def launcher(user: int, *groups: int) -> list[str]:
    """What makes a command another user's. It may read what root has, as the interpreter may lie there, and no more."""
    if not IS_ROOT:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv here")
    capabilities = [f"--{kind}=-all,+dac_read_search" for kind in ("bounding-set", "inh-caps", "ambient-caps")]
    others = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    return ["setpriv", f"--reuid={user}", f"--regid={user}", others, *capabilities]


def said_by(starter: list[str], code: str, *arguments: str) -> str:
    """What a Python prints that is started so."""
    command = [*starter, sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * WAIT_S)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the pool's, which its group may enter."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        if IS_ROOT:
            os.chown(path, POOL_USER, POOL_USER)
        path.chmod(0o750)
        yield path


@pytest.mark.parametrize("field", ["listen", "grpc_listen"])
@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.1.2.3:7600", "pool.site.example:7600"])
def test_what_others_can_reach_needs_tls_or_a_word_that_it_shall_not(field: str, address: str) -> None:
    with pytest.raises(ConfigError, match=rf"pool_service.{field}: .*pool_service.insecure = true"):
        require_protected(pool_config(**{field: ["127.0.0.1:0", address]}))
    require_protected(pool_config(**{field: [address]}, insecure=True))
    require_protected(
        pool_config(tls=TlsFiles(certificate=Path("pool.pem"), key=Path("pool.key")), **{field: [address]})
    )


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.8.9.1:0", "[::1]:0", "localhost:0", "unix:/pool.sock"])
def test_what_nobody_else_can_reach_needs_none(address: str) -> None:
    require_protected(pool_config(listen=[address], grpc_listen=[address], http_listen="0.0.0.0:0"))


def test_a_pool_in_the_clear_does_not_start_by_itself() -> None:
    tenants = [f"--tenant={name}={digest}" for digest, name in TENANTS.items()]
    arguments = ["--listen=0.0.0.0:0", "--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", *tenants]
    command = [sys.executable, "-m", "kvtier.cli.main", "pool", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * WAIT_S)
    assert done.returncode
    assert "pool_service.listen: 0.0.0.0:0 can be reached by other machines" in done.stderr
    pool = PoolProcess([*arguments, "--insecure"])
    pool.start()
    pool.kill()


def test_a_short_token_is_refused_whatever_it_is() -> None:
    with running_pool() as pool:
        transport = GrpcTransport(pool.grpc[0], "fifteen-letters")
        with pytest.raises(UnauthenticatedError, match="shorter than 16 bytes"):
            transport.lookup(keys([0]), WAIT_S)
        transport.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_another_process_of_the_pools_user_opens_nothing_of_it() -> None:
    starter = launcher(POOL_USER)
    with subprocess.Popen([*starter, sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as ordinary:
        until(lambda: "open" in said_by(starter, PEEK, str(ordinary.pid)))  # users may peek at what is theirs
        ordinary.communicate(b"\n")
    with pool_process(launcher=starter) as pool:
        assert said_by(starter, PEEK, str(pool.process.pid)).split() == ["closed"] * 3


def test_an_engine_of_another_user_shares_memory_with_such_a_pool(folder: Path) -> None:
    """The pool opens its memory anew to lend it, by its own /proc, which is closed to all others."""
    config = folder / "kvtier.toml"
    config.write_text(f'[pool_service]\nsocket_mode = 0o660\nlisten = "unix:{folder}/pool"\n')
    config.chmod(0o644)
    with pool_process(f"--config={config}", listen=f"unix:{folder}/pool", launcher=launcher(POOL_USER)):
        said = said_by(launcher(ENGINE_USER, POOL_USER), ENGINE, f"unix:{folder}/pool", TOKENS["red"]).splitlines()
        assert said == ["0", "(0, None) True", "65536.0", "65536.0"]


def test_the_group_of_sockets_can_be_chosen(tmp_path: Path) -> None:
    group = 12345 if IS_ROOT else os.getgid()
    paths = [tmp_path / "block", tmp_path / "grpc"]
    sockets = {"listen": [f"unix:{paths[0]}"], "grpc_listen": [f"unix:{paths[1]}"]}
    with running_pool(socket_mode=0o660, socket_group=group, **sockets):
        for path in paths:
            assert (path.stat().st_gid, path.stat().st_mode & 0o777) == (group, 0o660)
    with (
        pytest.raises(ConfigError, match=r"socket_group: 'no-such-group': there is no such group; make it"),
        running_pool(socket_group="no-such-group", **sockets),
    ):
        pass
    for wrong in (-1, 2**32 - 1, ""):
        with pytest.raises(ConfigError, match="socket_group"):
            pool_config(socket_group=wrong)
