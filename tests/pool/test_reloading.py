"""Tokens and tenants of a pool that runs: rotated, revoked, expired and reloaded, while others go on."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from configured_pool import BOSS, NEW, OLD, OTHER, configuration, digest, is_let_in, running
from kvtier.config.credentials import AcceptedToken, Role
from kvtier.errors import UnauthenticatedError
from kvtier.identity.keys import tenant_id
from kvtier.protocol import pool_pb2
from kvtier.testing.contract import make_key
from kvtier.tiers.base import Status, WriteStatus
from kvtier_pool.auth import Authenticator, LoginRefusedError
from kvtier_pool.service import Addresses, PoolService
from pool_rig import BLUE, RED, WAIT_S, connect, dial, items, keys, pool_config, until
from turned_clock import turned_clock


def test_a_rotation_needs_no_pause_and_a_revoked_token_ends_its_connections(tmp_path: Path) -> None:
    path = configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')
    with running(path) as pool:
        tier, blue = connect(pool.block, token=OLD), connect(pool.block, "blue", token=OTHER)
        try:
            assert tier.write(items(range(4))) == [WriteStatus.STORED] * 4
            blue.write(items(range(1), BLUE))
            configuration(path, f'"{digest(OLD)}", "{digest(NEW)}"')
            pool.says("the configuration has changed: the pool has")
            assert is_let_in(pool, NEW)
            assert is_let_in(pool, OLD)
            assert tier.lookup(keys(range(4))) == [Status.HIT] * 4
            configuration(path, f'"{digest(NEW)}"')
            pool.says("the configuration has changed: the pool has", times=2)
            assert not is_let_in(pool, OLD)
            assert tier.lookup(keys(range(4))) == [Status.MISS] * 4, "its connections are cut"
            assert blue.lookup(keys(range(1), BLUE)) == [Status.HIT], "others notice nothing"
        finally:
            tier.close()
            blue.close()
        again = connect(pool.block, token=NEW)
        assert again.lookup(keys(range(4))) == [Status.HIT] * 4
        again.close()


def test_a_bad_file_leaves_what_is_in_force_and_says_file_key_and_remedy(tmp_path: Path) -> None:
    path = configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')
    with running(path) as pool:
        for text, said in (
            ('"not a digest"', "pool.toml: tenants.red.token_sha256: not 64 lower-case hex digits; make it with"),
            (f'"{digest(OTHER)}"', "pool.toml: tenants.blue.token_sha256: the same token as tenant 'red'"),
            ('"env:NOT_THERE"', "environment variable NOT_THERE is missing or empty; export it"),
        ):
            configuration(path, text)
            pool.service.process.send_signal(signal.SIGHUP)
            pool.says(said)
            assert is_let_in(pool, OLD)
        path.unlink()
        pool.says("cannot read the configuration")
        assert is_let_in(pool, OLD)


def test_a_change_while_the_pool_starts_is_noticed(tmp_path: Path) -> None:
    path = configuration(tmp_path / "pool.toml", '"file:red.fifo"')
    os.mkfifo(tmp_path / "red.fifo")

    def change() -> None:
        with (tmp_path / "red.fifo").open("w") as fifo:  # once the pool has read the configuration, and reads this
            configuration(path, f'"{digest(NEW)}"')
            fifo.write(digest(OLD))

    with ThreadPoolExecutor(1) as other:
        changed = other.submit(change)
        with running(path) as pool:
            changed.result(WAIT_S)
            pool.says("the configuration has changed: the pool has")
            assert not is_let_in(pool, OLD)
            assert is_let_in(pool, NEW)


def test_a_file_that_was_missing_is_read_when_it_is_there(tmp_path: Path) -> None:
    path = configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')
    with running(path) as pool:
        configuration(path, '"file:new.sha256"')
        pool.says("cannot read")
        assert is_let_in(pool, OLD)
        (tmp_path / "new.sha256").write_text(digest(NEW))
        pool.says("the configuration has changed: the pool has")
        assert is_let_in(pool, NEW)


def test_a_revoked_token_keeps_no_call_and_no_place_of_grpc(tmp_path: Path) -> None:
    path = configuration(tmp_path / "pool.toml", f'"{digest(OLD)}", "{digest(NEW)}"')
    never = threading.Event()

    def says_nothing() -> Iterator[bytes]:
        never.wait(WAIT_S)
        yield from ()

    with running(path) as pool, grpc.insecure_channel(pool.grpc) as channel:
        metadata = [("authorization", f"Bearer {OLD}")]
        usage = channel.unary_unary("/kvtier.pool.v1.Pool/Usage")
        usage(pool_pb2.UsageRequest().SerializeToString(), metadata=metadata, timeout=WAIT_S)
        waiting = channel.stream_unary("/kvtier.pool.v1.Pool/Lookup").future(says_nothing(), metadata=metadata)
        configuration(path, f'"{digest(NEW)}"')
        with pytest.raises(grpc.RpcError) as error:
            waiting.result(WAIT_S)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        never.set()
        metadata = [("authorization", f"Bearer {NEW}")]

        def is_answered() -> bool:
            request = pool_pb2.UsageRequest().SerializeToString()
            try:
                return bool(usage(request, metadata=metadata, timeout=WAIT_S, wait_for_ready=True))
            except grpc.RpcError as error:
                # The call began on the connection that the pool was ending: gRPC leaves it to the caller to ask again.
                if error.code() is not grpc.StatusCode.UNAVAILABLE:  # type: ignore[attr-defined]
                    raise
                return False

        until(is_answered)


def test_tenants_that_are_new_get_in_and_those_that_are_gone_do_not(tmp_path: Path) -> None:
    path = configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"')
    with running(path) as pool:
        # More than the pool has streams of events, and half of its gRPC threads.
        tables = [f'[tenants.t{i}]\ntoken_sha256 = ["{digest(f"the-token-of-t{i}")}"]\n' for i in range(20)]
        configuration(path, f'"{digest(OLD)}"', "".join(tables))
        pool.service.process.send_signal(signal.SIGHUP)
        pool.says("SIGHUP: the pool has the tenants")
        for address in (pool.block, f"grpc:{pool.grpc}"):
            tier = connect(address, "t19", token="the-token-of-t19")
            assert tier.write(items([address], tenant_id("t19"))) == [WriteStatus.STORED], address
            tier.close()
        configuration(path, f'"{digest(OLD)}"')
        pool.says("the configuration has changed: the pool has")
        assert not is_let_in(pool, "the-token-of-t19", "t19")


def test_a_token_that_expires_ends_its_connections_and_streams(tmp_path: Path) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=6)
    path = configuration(tmp_path / "pool.toml", f'{{sha256 = "{digest(OLD)}", expires_at = {soon.isoformat()}}}')
    with turned_clock(tmp_path) as clock, running(path) as pool, grpc.insecure_channel(pool.grpc) as channel:
        events = channel.unary_stream("/kvtier.pool.v1.Pool/Events")(
            pool_pb2.EventsRequest().SerializeToString(),
            metadata=[("authorization", f"Bearer {OLD}")],
            timeout=WAIT_S,
        )
        tier = connect(pool.block, token=OLD)
        assert tier.write(items(range(1))) == [WriteStatus.STORED]
        with pytest.raises(grpc.RpcError) as error:
            for _ in events:
                pass
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED, error.value.details()
        assert tier.lookup(keys(range(1))) == [Status.MISS]
        tier.close()
        for seconds in (0, -86_400):
            if clock is not None:
                clock.turn(seconds)
            with pytest.raises(UnauthenticatedError, match="has expired: have another one made"):
                pool.dial(OLD)


def test_operators_and_observers_have_no_blocks(tmp_path: Path) -> None:
    roles = f'[operators.boss]\ntoken_sha256 = ["{digest(BOSS)}"]\n[observers.bob]\ntoken_sha256 = ["{digest(NEW)}"]\n'
    with running(configuration(tmp_path / "pool.toml", f'"{digest(OLD)}"', roles)) as pool:
        for token, role in ((BOSS, "operator"), (NEW, "observer")):
            with pytest.raises(UnauthenticatedError, match=f"the token is an {role}'s, who has no blocks"):
                pool.dial(token)
            tier = connect(f"grpc:{pool.grpc}", token=token)
            assert tier.lookup([make_key(1, tenant=RED)]) == [Status.MISS]
            tier.close()


def test_the_clock_decides() -> None:
    now = [100.0]
    auth = Authenticator([AcceptedToken(digest(OLD), Role.TENANT, "red", 200.0)], clock=lambda: now[0])
    login = auth.tenant(OLD)
    assert auth.is_current(login)
    now[0] = 200.0
    assert not auth.is_current(login)
    with pytest.raises(LoginRefusedError) as error:
        auth.tenant(OLD)
    assert (error.value.reason, error.value.token, error.value.name) == ("expired_token", digest(OLD)[:8], "red")
    auth.accept([AcceptedToken(digest(OLD), Role.TENANT, "red", 300.0)], {})
    assert auth.is_current(login), "a token's end may be put off"
    auth.accept([AcceptedToken(digest(OLD), Role.TENANT, "blue")], {})
    assert not auth.is_current(login), "a login is one tenant's for good"
    with pytest.raises(LoginRefusedError, match="not known") as error:
        auth.tenant(NEW)
    assert error.value.token == digest(NEW)[:8]


def test_a_revoked_token_is_out_before_tenants_come_down_to_lowered_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may take seconds for that."""
    config = pool_config()
    without_blue = config.model_copy(update={"tenants": {"red": config.tenants["red"]}})
    let_in: list[bool] = []
    service = PoolService(config)
    addresses = service.start()
    try:
        monkeypatch.setattr(service._core, "set_shares", lambda *_: let_in.append(can_log_in(addresses, "blue")))
        service.take(without_blue)
        assert let_in == [False]
        assert can_log_in(addresses, "red")
    finally:
        service.stop()


def can_log_in(addresses: Addresses, tenant: str) -> bool:
    try:
        dial(addresses.block[0], tenant).close()
    except UnauthenticatedError:
        return False
    return True
