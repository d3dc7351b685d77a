"""Engines on this machine, a pool in a container, and two tenants from a file of the operator's."""

import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from compose_rig import ROOT, Stack
from kvtier.config import load_config, parse_config, token_sha256
from kvtier.config.accepted import accepted_tokens
from kvtier_engine.demo.ask import post
from kvtier_engine.demo.demo_model import demo_model_path
from kvtier_engine.demo.stage import TENANTS, Stage

OVERRIDE = """\
version: "3.8"
services:
  pool:
    volumes:
      - {}:/etc/kvtier/kvtier.toml:ro
"""
PATIENT = {"KVTIER__CACHE__LOOKUP_DEADLINE_S": "30", "KVTIER__POOL__CALL_TIMEOUT_S": "30"}
"""Where other work has the processors, a pool in a container is slow, and nobody misses for that here."""
PROMPT = {"prompt": "the quick brown fox " * 40, "max_tokens": 1, "temperature": 0}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    prepared = Stage.prepare(tmp_path, demo_model_path(), "bfloat16")
    return replace(prepared, environ={**prepared.environ, **PATIENT})


@pytest.fixture
def stack_of_two(stage: Stage, image: str) -> Iterator[Stack]:
    """The image's own configuration, but for its tenants: those of the stage."""
    _, service = (ROOT / "deploy/pool.toml").read_text().split("[pool_service]")
    tables = [
        f'[tenants.{name}]\ntoken_sha256 = ["{token_sha256(stage.environ[f"DEMO_{name.upper()}_TOKEN"])}"]\n'
        for name in TENANTS
    ]
    file = stage.folder / "kvtier.toml"
    file.write_text("".join(tables) + "[pool_service]" + service)
    file.chmod(0o644)
    with Stack(image, stage.folder, override=OVERRIDE.format(file)) as running:
        yield running


def test_engines_share_their_tenants_blocks_and_no_others(stage: Stage, stack_of_two: Stack) -> None:
    answers = []
    for name, tenant in (("a", "red"), ("b", "red"), ("c", "blue")):
        with stage.engine(name, tenant=tenant, pool_address=stack_of_two.block) as engine:
            answers.append(post(f"{engine.ready()['url']}/v1/completions", PROMPT))
    details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    assert details[0]["cached_tokens"] == 0
    assert details[1]["cached_tokens_by_tier"]["pool"] >= 128
    assert details[2]["cached_tokens"] == 0, "another tenant meets nothing"
    assert len({tuple(answer["kvtier"]["token_ids"]) for answer in answers}) == 1


def test_what_the_documentation_shows_works_together(tmp_path: Path) -> None:
    """Its lines make the engines' half in one file and the pool's in another, and both configurations take theirs."""
    script = "\n".join(line for line in documented("sh", "openssl").splitlines() if not line.startswith("docker"))
    subprocess.run(["sh", "-eu", "-c", script], cwd=tmp_path, check=True, timeout=60)
    again = subprocess.run(["sh", "-eu", "-c", script], cwd=tmp_path, capture_output=True, timeout=60)
    assert again.returncode != 0, "what is there is not written over"
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("engine.env", ".env")} == {0o600}
    engines, pools = (variables(tmp_path / name) for name in ("engine.env", ".env"))
    engine = parse_config(tomllib.loads(documented("toml", "KVTIER_TOKEN")), source="docs", environ=engines)
    pool = load_config(ROOT / "deploy/pool.toml", environ=pools)
    (tenant,) = engine.engine_tenants()
    secret, token = engine.chain_secret(tenant), engine.pool_token(tenant)
    assert token is not None
    assert [(t.digest, t.name) for t in accepted_tokens(pool)] == [(token_sha256(token), tenant)]
    assert secret not in (token.encode(), *(value.encode() for value in pools.values()))


def documented(language: str, word: str) -> str:
    """The first block of code in the documentation that has `word` in it."""
    text = (ROOT / "docs/deployment.md").read_text()
    blocks = (block.partition("```")[0] for block in text.split(f"```{language}\n")[1:])
    return next(block for block in blocks if word in block)


def variables(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().split())
