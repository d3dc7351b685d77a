"""`kvtier tenants`: commands for the tenants of a cache pool."""

import hashlib
import secrets
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvtier.cli.amounts import short_bytes_text, short_count_text
from kvtier.cli.options import Json, command_group, print_json, telling_in_json
from kvtier.errors import ConfigError, InvalidInputError, KvtierError, UnavailableError
from kvtier.identity.keys import tenant_id
from kvtier_pool.credential_file import CredentialFile
from kvtier_pool.operator_client import ask, connected, received
from kvtier_pool.operator_socket import Lines, running_pools
from kvtier_pool.progress import PURGING

app = command_group(help="The tenants of a cache pool.")

_Pid = Annotated[int | None, typer.Option(help="Process of the pool; needed where several run.")]
_File = Annotated[Path, typer.Option("--config", help="The pool's TOML file, which is edited.")]
_Name = Annotated[str, typer.Argument(help="The tenant.")]


@app.command("list")
@telling_in_json
def list_(
    pid: _Pid = None,
    json: Json = False,
) -> None:
    """What each tenant has of a running pool on this host, and how often it hits.

    For root and the user that the pool runs as, where the pool runs: in its container if it is in one. From elsewhere,
    GET /tenants of the pool's HTTP port answers the same to an operator's token.

    Example: kvtier tenants list --json | jq '.tenants.red'
    """
    report = asked(pid, {"verb": "tenants"})
    if json:
        print_json(report)
        return
    Console(width=None if sys.stdout.isatty() else 200).print(table_of(report["tenants"]))


def table_of(tenants: dict[str, Any]) -> Table:
    """What the command shows of the tenants, in 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("tenant", overflow="ellipsis")
    for column in ("memory", "disk", "blocks", "hits", "misses", "evicted", "unwritten", "refused", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, figures in tenants.items():
        table.add_row(name, *_row(figures))
    return table


def _row(figures: dict[str, Any]) -> list[str]:
    tiers = figures["tiers"]
    sizes = [short_bytes_text(tiers[tier]["used_bytes"]) if tier in tiers else "-" for tier in ("memory", "disk")]
    num_unwritten = figures["num_full"] + figures["num_throttled"]
    counts = [figures["num_hits"], figures["num_misses"], figures["num_evicted"], num_unwritten, figures["num_refused"]]
    num_blocks = max(tier["num_blocks"] for tier in tiers.values())
    num_tokens = sum(_holds(token["expires_at"]) for token in figures["tokens"])
    return [*sizes, *map(short_count_text, (num_blocks, *counts)), str(num_tokens)]


def _holds(expires_at: str | None) -> bool:
    """Whether a token with this end is still accepted."""
    return expires_at is None or datetime.fromisoformat(expires_at) > datetime.now(UTC)


@app.command()
def add(name: _Name, config: _File, pid: _Pid = None) -> None:
    """Adds a tenant, and prints its token, once.

    The file gets the token's digest, the running pool reads it, and nobody but who reads this output has the token.

    Example: kvtier tenants add red --config /etc/kvtier/kvtier.toml > red.env
    """
    try:
        tenant_id(name)
    except InvalidInputError as error:
        raise ConfigError(str(error)) from error
    token, digest = _new_token()
    file = CredentialFile(config)
    file.add_tenant(name, digest)
    file.save()
    print(f"KVTIER_TOKEN={token}", flush=True)
    _say(
        f"Tenant {name} is in {config}. In the configuration of its engines, [tenants.{name}] needs this token "
        '(token = "env:KVTIER_TOKEN") and a secret of their own, which keys their blocks and which the pool must not '
        "have: echo KVTIER_SECRET=$(openssl rand -hex 32). Engines with the same secret and salt share; another secret "
        "or salt forgets everything."
    )
    _reload(pid)


@app.command()
def rotate(
    name: _Name,
    config: _File,
    overlap_s: Annotated[
        float, typer.Option(min=0, help="Seconds for which the tenant's other tokens still hold.")
    ] = 86_400.0,
    pid: _Pid = None,
) -> None:
    """Gives a tenant another token, printed once, and lets its others end after --overlap-s.

    Example: kvtier tenants rotate red --config /etc/kvtier/kvtier.toml --overlap-s 3600 > red.env
    """
    try:
        others_end = datetime.now(UTC) + timedelta(seconds=overlap_s)
    except OverflowError as error:
        raise ConfigError(
            f"--overlap-s {overlap_s:g}: no calendar has such a date; give seconds, such as 604800 for a week"
        ) from error
    token, digest = _new_token()
    file = CredentialFile(config)
    ending = file.add_token(name, digest, others_end)
    file.save()
    print(f"KVTIER_TOKEN={token}", flush=True)
    if ending:
        verb = "is" if len(ending) == 1 else "are"
        left = f"within {overlap_s:,.0f} s: after that, {', '.join(ending)} {verb} no longer accepted"
    else:
        left = "at any time: no other token of the tenant ends because of it"
    _say(f"Give it to the engines of {name} {left}.")
    _reload(pid)


@app.command()
def revoke(
    name: _Name,
    config: _File,
    token: Annotated[str | None, typer.Argument(metavar="TOKEN-ID", help="Left out: all of the tenant's.")] = None,
    pid: _Pid = None,
) -> None:
    """Removes tokens of a tenant; connections that were opened with them end.

    The first digits of a token's digest are its id; the audit log has them.

    Example: kvtier tenants revoke red 1c49d432 --config /etc/kvtier/kvtier.toml
    """
    file = CredentialFile(config)
    removed = file.remove_tokens(name, token)
    file.save()
    left = len(file.tokens(name)) - len(removed)
    _say(f"Removed {', '.join(removed) or 'nothing'}; {name} has {left} {'token' if left == 1 else 'tokens'} left.")
    _reload(pid)


@app.command()
def purge(
    name: _Name,
    pid: _Pid = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether it is meant.")] = False,
) -> None:
    """Removes everything of a tenant from memory, disk and Redis of a running pool on this host.

    Revoke its tokens before, or its engines write anew. Exit code 1 when something is left: run it again, also after a
    pool that has died in the middle, or has said nothing for 30 s. Other pools of the same Redis, and disks of engines,
    have blocks of their own.

    Example: kvtier tenants purge red --yes
    """
    if not yes and not typer.confirm(f"Remove everything that tenant {name} has?"):
        raise typer.Exit(1)
    report = _purged(pid, name)
    for tier, count in report["removed"].items():
        print(f"{tier}: {count:,} {'values' if tier == 'redis' else 'blocks'} removed")
    if not report["has_credentials"] and not any(report["removed"].values()):
        _say(f"No tenant {name} is configured, and nothing was left of one: is the name right?")
    if report["has_credentials"]:
        _say(f"Tenant {name} may still log in, and write anew: `kvtier tenants revoke {name}` ends that.")
    if report["problems"]:
        raise UnavailableError(f"not everything is gone: {'; '.join(report['problems'])}; run this again")


def _purged(pid: int | None, tenant: str) -> dict[str, Any]:
    """What a purge has removed. Raises as `asked` does, and says then what becomes of the purge."""
    what_follows = (
        "a pool of this release has not begun the purge, and does not begin it later: purge again when it answers"
    )
    with connected(pid) as connection, Console(stderr=True).status(f"purging {tenant}"):
        ask(connection, {"verb": "purge", "tenant": tenant})
        lines = Lines(connection)
        try:
            while PURGING in (message := received(lines)):
                what_follows = "the purge has begun and may go on: purge again when the pool answers, to be sure"
        except UnavailableError as error:
            raise UnavailableError(f"{error}; {what_follows}") from error
    return message


def asked(pid: int | None, request: dict[str, Any]) -> dict[str, Any]:
    """What a pool on this host answers. Raises as `connected` and `received` do."""
    with connected(pid) as connection:
        ask(connection, request)
        return received(Lines(connection))


def _new_token() -> tuple[str, str]:
    """A token, and its digest."""
    token = secrets.token_hex(32)
    return token, hashlib.sha256(token.encode()).hexdigest()


def _reload(pid: int | None) -> None:
    """Has the running pool read its file, and says whether it did. Raises `ConfigError` where the pool refuses it."""
    if pid is None and len(running_pools()) != 1:
        _say("No pool was told: one that runs with this file reads it within a few seconds, and logs what is wrong.")
        return
    try:
        problem = asked(pid, {"verb": "reload"})["problem"]
    except KvtierError as error:
        _say(f"The pool was not told ({error}); it reads the file within a few seconds, and logs what is wrong.")
        return
    if problem is not None:
        raise ConfigError(f"the file is written, and the pool does not take it: {problem}")
    _say("The pool has read its file.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
