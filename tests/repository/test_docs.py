"""What the documentation names is there: files, links, commands, public names."""

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from kvtier.tiers.redis.address import Kind, RedisAddress

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
ADRS = sorted((ROOT / "docs" / "adr").glob("*.md"))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
STATUS = re.compile(r"Status: (accepted|amended by \[\d+\]\(.+\)|superseded by \[\d+\]\(.+\))\.")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(without_code(page.read_text()))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text())}
    assert {page for page in ROOT.glob("docs/**/*.md") if page != index} <= linked


@pytest.mark.parametrize("adr", ADRS, ids=lambda adr: adr.name)
def test_every_decision_has_a_status(adr: Path) -> None:
    status = adr.read_text().splitlines()[2]
    assert STATUS.fullmatch(status), status
    rows = (ROOT / "docs" / "README.md").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith("| [") and f"](adr/{adr.name}) " in row.split(" | ")[0]]
    assert row.endswith(f"| {status.removeprefix('Status: ').rstrip('.').replace('](', '](adr/')} |")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md", ".github/workflows/ci.yml"])
def test_targets_of_make_are_there(page: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^ *|run: )make ([a-z][\w-]*)", (ROOT / page).read_text(), flags=re.MULTILINE))
    assert {target for target in named if target not in targets} == set()


def test_recipes_name_files_that_are_there() -> None:
    text = without_code((ROOT / "CONTRIBUTING.md").read_text())
    named = {path for path in re.findall(r"`([\w./-]+/[\w./-]+)`", text) if "NAME" not in path}
    assert len(named) > 30
    assert {path for path in named if not (ROOT / path).exists()} == set()


def recipe_of_secrets() -> str:
    page = (ROOT / "docs" / "deployment.md").read_text()
    blocks = (block.partition("```")[0] for block in page.split("```sh\n")[1:])
    return next(block for block in blocks if "KVTIER_TOKEN_SHA256" in block).replace("docker-compose", "true")


@pytest.mark.parametrize("missing", ["openssl", "sha256sum"])
def test_recipes_of_secrets_make_no_empty_ones(missing: str, tmp_path: Path) -> None:
    """They stop, and leave no file, where a command that they need fails."""
    recipe = recipe_of_secrets()
    broken, folder = tmp_path / "bin", tmp_path / "site"
    broken.mkdir()
    folder.mkdir()
    (broken / missing).write_text("#!/bin/sh\nexit 127\n")
    (broken / missing).chmod(0o755)
    environ = {"PATH": f"{broken}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", f"set -e\n{recipe}"], cwd=folder, env=environ, capture_output=True, timeout=60)
    assert done.returncode
    assert not list(folder.iterdir())


@pytest.mark.parametrize("there", [".env", "engine.env"])
def test_recipes_of_secrets_make_no_halves_of_pairs(there: str, tmp_path: Path) -> None:
    """A digest in `.env` of another token than that in `engine.env` lets nobody in."""
    recipe = recipe_of_secrets()
    (tmp_path / there).write_text("KVTIER_BIND=127.0.0.1\n")
    done = subprocess.run(["sh", "-c", f"set -e\n{recipe}"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode
    assert done.stdout == f"{there}\n"
    assert [path.name for path in tmp_path.iterdir()] == [there]


@pytest.mark.parametrize(("page", "least"), [("security.md", 81), ("first-five-minutes.md", 30)])
def test_pages_name_tests_that_are_there(page: str, least: int) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text))
    assert len(named) >= least
    assert text.count("::") == len(re.findall(r"`tests/[\w/]+\.py::test_\w+`", text)), "each with its path"
    texts = {path: (ROOT / path).read_text() for path, _ in named if (ROOT / path).exists()}
    missing = {(path, name) for path, name in named if f"def {name}(" not in texts.get(path, "")}
    assert missing == set()


def test_public_names_are_there() -> None:
    table = (ROOT / "docs" / "api.md").read_text().split("## Python")[1].split("## ")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `kvtier.")]
    assert len(rows) > 8
    for modules, names in rows:
        inside = [importlib.import_module(module) for module in re.findall(r"`(kvtier[.\w]+)`", modules)]
        for name in re.findall(r"`(\w+)(?:\.\w+)?`", names):
            assert any(hasattr(module, name) for module in inside), f"docs/api.md: {name} is not in {modules}"


def test_urls_of_redis_can_be_read() -> None:
    text = (ROOT / "docs" / "deployment.md").read_text()
    urls = re.findall(r"^\| `((?:redis|unix)[^`]+)`", text, flags=re.MULTILINE)
    parsed = [RedisAddress.parse(url.replace("port", "7000").replace("/db", "/1")) for url in urls]
    assert [address.kind for address in parsed] == [Kind.SINGLE, Kind.SINGLE, Kind.SENTINEL, Kind.CLUSTER]
