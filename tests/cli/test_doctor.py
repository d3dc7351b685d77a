"""`kvtier doctor` tells the cause of what is broken, in one line each, beside real pools, servers and certificates."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from certificates import Authority
from configured_pool import running
from doctor_rig import PASSWORD, TOKEN, diagnosed, diagnosed_as, engine_file, pool_file, run
from free_port import free_port
from pool_rig import connect, items, until
from redis_rig import KEYS, running_cluster, running_redis
from suspending import suspended

AN_OTHER_USER = 1234


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """One that other users may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="kvtier-doctor-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_misspelt_key(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text("[pool]\nadress = '127.0.0.1:7600'")
    diagnosed(file).tells("pool.adress", "unknown key", "did you mean 'address'")
    found = diagnosed(engine_file(tmp_path, "127.0.0.1:1"), THE_TOKEN="")
    assert len(found.problems()) == 1
    found.tells("tenants.red.token", "THE_TOKEN is missing")
    diagnosed(tmp_path / "nowhere.toml").tells("nowhere.toml", "cannot read the configuration")


def test_a_whole_set_up_and_a_wrong_token(tmp_path: Path) -> None:
    """The same pool, by its socket and by TCP: what works has no problem, and says which way blocks go."""
    socket_path = tmp_path / "pool.sock"
    more = f"disk_dir = 'disk'\ndisk_reserve_bytes = '1MiB'\nhttp_listen = '127.0.0.1:{free_port()}'"
    file = pool_file(tmp_path, more, listen=f"unix:{socket_path}")
    file.write_text(file.read_text().replace("listen = ['unix:", "listen = ['127.0.0.1:0', 'unix:"))
    with running(file) as pool:
        tcp = pool.block.split(",")[0]
        found = diagnosed(engine_file(tmp_path, f"unix:{socket_path}"))
        assert found.code == 0, found.problems()
        found.tells("blocks go by shared memory", "this tenant has 0 blocks", level="ok")
        found = diagnosed(engine_file(tmp_path, tcp, "connect_timeout_s = 3"))
        assert found.code == 0, found.problems()
        found.tells("none of its Unix sockets is in pool.address", "shared memory would be", level="note")
        found = diagnosed(engine_file(tmp_path, [f"grpc:127.0.0.1:{free_port()}", tcp, f"unix:{tmp_path}/none"]))
        assert found.code == 0, found.problems()
        found.tells("there is no such socket", "a slower way is taken", level="warning")
        found.tells("pool.address grpc:", "nobody listens there", "nothing is left if", level="warning")
        found = diagnosed(engine_file(tmp_path, f"grpc:{pool.grpc}"))
        found.tells("blocks go by gRPC", level="ok")
        found = diagnosed(engine_file(tmp_path, f"unix:{socket_path}", "shared_memory = false"))
        found.tells("pool.shared_memory", "set it to true", level="note")
        for address in (tcp, f"grpc:{pool.grpc}"):
            found = diagnosed(engine_file(tmp_path, address), THE_TOKEN="some-other-token")
            found.tells(f"pool.address {address}", "refuses the token of tenant 'red'", "token_sha256")
        found = diagnosed(file)
        assert found.code == 0, found.problems()
        found.tells("pool_service.listen", "a pool answers at http://", level="ok")
        found.tells(
            "pool_service.disk_dir", f"in use by process {pool.service.process.pid}", "with this file", level="ok"
        )
        other = tmp_path / "other.toml"
        other.write_text(file.read_text().replace("'disk'", "'other'"))
        found = diagnosed(other)
        found.tells("a pool answers at http://", "no pool of this machine was started with this file")
        socket_path.rename(tmp_path / "moved.sock")
        (tmp_path / "disk").rename(tmp_path / "moved")
        found = diagnosed(file)
        found.tells(f"unix:{socket_path}: the socket's file was removed", "restart the pool")
        found.tells("pool_service.disk_dir", "was removed under the pool that runs with this file", "restart")
        (tmp_path / "moved").rename(tmp_path / "disk")
        (tmp_path / "disk" / "kvtier-disk-tier").rename(tmp_path / "marker")
        writer = connect(pool.block, token=TOKEN)
        writer.write(items(range(4)))
        until(lambda: "disk is off" in httpx.get(f"http://{pool.http}/healthz").text)
        found = diagnosed(file, KVTIER__ENGINE__MODEL_CACHE_DIR=str(tmp_path))
        found.tells("pool_service.listen", "a pool answers at http://", "disk is off: ", "see the pool's log")
        assert not any("engine.model" in text for text in found.of("warning")), "it is a pool's file"
        writer.close()
        (tmp_path / "marker").rename(tmp_path / "disk" / "kvtier-disk-tier")
        with suspended(pool.service.process.pid):
            found = diagnosed(engine_file(tmp_path, tcp, "connect_timeout_s = 0.2"))
            found.tells("connected, but no greeting in time", "the pool hangs or is stopped")


def test_a_dead_pool_and_a_black_hole(tmp_path: Path) -> None:
    port = free_port()
    found = diagnosed(engine_file(tmp_path, f"127.0.0.1:{port}"))
    found.tells(f"pool.address 127.0.0.1:{port}", "nobody listens there", "computes every prompt", "start the pool")
    diagnosed(pool_file(tmp_path, listen=f"127.0.0.1:{port}")).tells("no pool runs here", level="note")
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "left.sock"))
    left.close()
    diagnosed(engine_file(tmp_path, f"unix:{tmp_path}/left.sock")).tells("nobody listens: its pool has ended")
    diagnosed(engine_file(tmp_path, f"unix:{tmp_path}/none.sock")).tells("there is no such socket")
    (tmp_path / "file.sock").touch()
    found = diagnosed(engine_file(tmp_path, f"unix:{tmp_path}/file.sock"))
    found.tells("there is no socket, but another file", "name the pool's socket")
    diagnosed(engine_file(tmp_path, f"unix:{tmp_path}")).tells("there is no socket, but a folder")
    diagnosed(engine_file(tmp_path, f"grpc:unix:{tmp_path}/file.sock")).tells("there is no socket, but another file")
    found = diagnosed(engine_file(tmp_path, f"unix:{tmp_path}/file.sock/below"))
    found.tells("no socket can be there: Not a directory", "correct the path")
    with socket.create_server(("127.0.0.1", 0), backlog=0) as hole:
        place = hole.getsockname()
        with socket.create_connection(place):  # its queue is full: what comes next is not answered
            found = diagnosed(engine_file(tmp_path, f"127.0.0.1:{place[1]}", "connect_timeout_s = 0.2"))
            found.tells(f"pool.address 127.0.0.1:{place[1]}", "no answer within 0.2 s", "firewall")
        own = pool_file(tmp_path, "http_listen = '127.0.0.1:1'", listen=f"127.0.0.1:{place[1]}")
        diagnosed(own).tells("somebody listens at", "no pool answers at http://127.0.0.1:1")


def test_a_server_of_another_kind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            with suppress(OSError):
                while True:
                    listening.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n")

        threading.Thread(target=greet, daemon=True).start()
        found = diagnosed(engine_file(tmp_path, f"127.0.0.1:{listening.getsockname()[1]}"))
        found.tells("it begins with b'SSH-'", "correct the address", "`listen`")
        found = diagnosed(engine_file(tmp_path, f"grpc:127.0.0.1:{listening.getsockname()[1]}"))
        found.tells("whatever listens there does not answer in gRPC", "`grpc_listen`")
        listening.shutdown(socket.SHUT_RDWR)


def test_a_full_disk_and_too_little_memory(tmp_path: Path) -> None:
    more = "disk_dir = 'disk'\ndisk_reserve_bytes = '900TiB'\nmemory_bytes = '900TiB'"
    (tmp_path / "disk").mkdir()
    found = diagnosed(pool_file(tmp_path, more))
    found.tells("pool_service.disk_reserve_bytes", "nothing will be stored", "use a larger file system")
    found.tells("pool_service.memory_bytes", "in all: the kernel will end the pool", "Lower it")
    found.tells("pool_service.disk_dir", "O_DIRECT", "free", level="ok")
    assert list((tmp_path / "disk").iterdir()) == [], "the probe is gone"
    (tmp_path / "disk" / "letters.txt").touch()
    diagnosed(pool_file(tmp_path, "disk_dir = 'disk'")).tells("holds other files", "name an empty or new folder")
    (tmp_path / "disk" / "00000001.segment").touch()
    diagnosed(pool_file(tmp_path, "disk_dir = 'disk'")).tells("has segments, and its file kvtier-disk-tier is gone")


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 64 KiB with a disk tier in it."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, timeout=20).returncode:
        pytest.skip("needs the right to mount: root, outside of a container without CAP_SYS_ADMIN")
    try:
        (folder / "kvtier-disk-tier").write_text("kvtier disk tier, format 2\n")
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=20)


def test_a_file_system_without_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as folder:
        (folder / "00000001.segment").write_bytes(bytes(60 << 10))
        found = diagnosed(pool_file(tmp_path, "disk_dir = 'disk'\ndisk_reserve_bytes = 0"))
        found.tells("pool_service.disk_dir", "tmpfs", "No space left on device", "free the file system")


def test_a_file_system_that_takes_no_writes(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, timeout=20)
        file = pool_file(tmp_path, "disk_dir = 'disk'\ndisk_reserve_bytes = 0")
        diagnosed(file).tells("pool_service.disk_dir", "tmpfs, which is mounted read-only", "remount it")
        command = [sys.executable, "-m", "kvtier.cli.main"]
        checked = subprocess.run([*command, "config", "check", file], capture_output=True, text=True, timeout=60)
        assert (checked.returncode, "Read-only file system" in checked.stdout) == (1, True), checked
        looked = subprocess.run([*command, "fsck", str(folder)], capture_output=True, text=True, timeout=60)
        assert looked.returncode == 0, looked


def test_a_redis_with_another_password(tmp_path: Path) -> None:
    with running_redis(tmp_path, password=PASSWORD) as server:
        more = f"redis_url = '{server.url}'\n"
        secret = "redis_password = 'env:THE_PASSWORD'"
        found = diagnosed(pool_file(tmp_path, more + secret))
        assert found.code == 0, found.problems()
        found.tells("the Redis has no `maxmemory`", "allkeys-lru", level="warning")
        found.tells("pool_service.redis_url", "answers in", level="ok")
        found.tells("clock", "agrees with that of the Redis", level="ok")
        found = diagnosed(pool_file(tmp_path, more + secret), THE_PASSWORD="not-the-password")
        found.tells("pool_service.redis_password", "the Redis refuses", "set redis_password", "requirepass")
        diagnosed(pool_file(tmp_path, more)).tells("the Redis refuses", "set redis_password")
        with suspended(server.process.pid):
            found = diagnosed(pool_file(tmp_path, f"{more}{secret}\nredis_timeout_s = 0.3"))
            found.tells("pool_service.redis_url", "Redis at 127.0.0.1")
    diagnosed(pool_file(tmp_path, more + secret)).tells("Connection refused", "start the Redis")


def test_a_redis_that_the_running_pool_has_given_up(tmp_path: Path) -> None:
    """As its health says, as long as nothing has made the pool ask again."""
    with running_redis(tmp_path) as server:
        file = pool_file(tmp_path, f"redis_url = '{server.url}'\nhttp_listen = '127.0.0.1:{free_port()}'")
        with running(file) as pool:
            server.kill()
            client = connect(pool.block, token=TOKEN)
            health = f"http://{pool.http}/healthz"
            until(lambda: bool(client.lookup(KEYS)) and "redis: a server is left alone" in httpx.get(health).text)
            found = diagnosed(file)
            found.tells("pool_service.listen", "a pool answers at http://", "redis: a server is left alone")
            server.start()
            until(lambda: bool(client.lookup(KEYS)) and httpx.get(health).text == "ok\n")
            client.close()


def test_a_server_of_a_cluster(tmp_path: Path) -> None:
    with running_cluster(tmp_path, num_nodes=2) as nodes:
        found = diagnosed(pool_file(tmp_path, f"redis_url = '{nodes[0].url}'"))
        found.tells("one of a Cluster", "redis+cluster://")
        found = diagnosed(pool_file(tmp_path, f"redis_url = 'redis+cluster://127.0.0.1:{nodes[0].port}'"))
        assert found.code == 0, found.problems()
        for node in nodes:
            found.tells(f"pool_service.redis_url 127.0.0.1:{node.port}", "answers in", level="ok")
        nodes[1].kill()
        found = diagnosed(pool_file(tmp_path, f"redis_url = 'redis+cluster://127.0.0.1:{nodes[0].port}'"))
        found.tells(f"redis_url 127.0.0.1:{nodes[1].port}", "Connection refused", "the other nodes serve theirs")
        found.tells(f"redis_url 127.0.0.1:{nodes[0].port}", "answers in", level="ok")
    found = diagnosed(pool_file(tmp_path, f"redis_url = 'redis+cluster://127.0.0.1:{nodes[0].port}'"))
    found.tells("pool_service.redis_url", "Connection refused", "the pool runs without this tier")


def test_sentinels_that_are_dead(tmp_path: Path) -> None:
    found = diagnosed(pool_file(tmp_path, f"redis_url = 'redis+sentinel://127.0.0.1:{free_port()}/main'"))
    found.tells("no Sentinel answers", "one that runs keeps to the master that it knows", "start the Sentinels")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_a_socket_of_another_user(public_folder: Path, tmp_path: Path) -> None:
    path = public_folder / "pool.sock"
    file = engine_file(public_folder, f"unix:{path}", "[disk]\ndirectory = 'disk'")
    file.chmod(0o644)
    with running(pool_file(tmp_path, listen=f"unix:{path}")):
        found = diagnosed_as(AN_OTHER_USER, file)
        found.tells("pool.address unix:", f"user {AN_OTHER_USER} may not use the socket", "socket_mode = 0o660")
        found.tells("disk.directory", f"user {AN_OTHER_USER} may not make", "0755 of user 0", "chown")
        assert not any("may not" in text for text in diagnosed(file).problems())
        file.write_text(file.read_text().replace("'disk'", f"'{tmp_path}/disk'"))
        found = diagnosed_as(AN_OTHER_USER, file)
        found.tells("configuration", "Permission denied", "run this as the user that the process has")
        found.tells("disk.directory", f"user {AN_OTHER_USER} may not enter the folders above")


def test_a_pool_that_refuses_the_certificate_of_an_engine(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("pool", "127.0.0.1")
    authority.issue("engine", "engine.example", valid_days=-1)
    more = "tls_certificate = 'pool.pem'\ntls_key = 'pool.key'\ntls_client_ca = 'authority.pem'"
    with running(pool_file(tmp_path, more)) as pool:
        tls = "tls_ca = 'authority.pem'\ntls_certificate = 'engine.pem'\ntls_key = 'engine.key'"
        found = diagnosed(engine_file(tmp_path, pool.block, tls))
        found.tells(f"pool.address {pool.block}", "the pool refuses this engine's certificate (certificate expired)")


def test_an_expired_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("pool", "127.0.0.1", valid_days=-1)
    more = "tls_certificate = 'pool.pem'\ntls_key = 'pool.key'"
    file = pool_file(tmp_path, more)
    diagnosed(file).tells("pool_service.tls_certificate", "expired at", "renew it (docs/tls.md)")
    with running(file) as pool:
        engine = engine_file(tmp_path, pool.block, "tls_ca = 'authority.pem'")
        diagnosed(engine).tells(f"pool.address {pool.block}", "certificate has expired", "renew it")
        authority.issue("pool", "127.0.0.1", valid_days=20_000)
        found = diagnosed(engine)
        assert found.code == 0, found.problems()
        found.tells("blocks go by TLS", level="ok")
    diagnosed(file).tells("pool_service.tls_certificate", "holds until 20", level="ok")
    authority.issue("pool", "127.0.0.1", valid_days=3)
    diagnosed(file).tells("pool_service.tls_certificate", "expires at", level="warning")


def test_two_pools_on_one_folder(tmp_path: Path) -> None:
    disk = "disk_dir = 'disk'\ndisk_reserve_bytes = '1MiB'"
    second = pool_file(tmp_path, disk, name="second.toml")
    with running(pool_file(tmp_path, disk)) as pool:
        found = diagnosed(second)
        found.tells("pool_service.disk_dir", f"in use by process {pool.service.process.pid}", "pool.toml", "its own")
    assert diagnosed(second).code == 0


def test_what_is_printed_fits_and_says_how_many(tmp_path: Path) -> None:
    done = run(engine_file(tmp_path, "127.0.0.1:1"))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert [line for line in lines if len(line) > 80 and str(tmp_path) not in line] == []
    assert lines[1].startswith("problem  pool.address 127.0.0.1:1: nobody listens there")
    assert lines[-1].startswith("1 problem, ")


def test_what_is_printed_fits_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for words that are longer, such as paths."""
    monkeypatch.setenv("COLUMNS", "40")
    command = [sys.executable, "-m", "kvtier.cli.main", "config", "keys", "disk"]
    keys = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    for said in (keys.stdout, run(engine_file(tmp_path, "127.0.0.1:1")).stdout):
        lines = [line for line in said.splitlines() if len(line.split()) > 2 and str(tmp_path) not in line]
        assert lines
        assert [line for line in lines if len(line) > 40] == []
