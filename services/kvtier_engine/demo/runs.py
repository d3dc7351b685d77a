"""The demo's runs: which process asks what, as which tenant, through which cache."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.config import token_sha256
from kvtier.system.processes import Service
from kvtier_engine.demo.ask import post
from kvtier_engine.demo.document import Person, messages, people

MAX_ANSWER_TOKENS = 32
TENANTS = ("red", "blue")
PEOPLE_ASKED = (people()[-19], people()[17])
"""Engine A asks about the first, engine B about the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request and its answer."""

    name: str
    question: str
    ttft_s: float
    """Seconds from the engine's receipt of the request to its first token."""
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    answer: str
    answer_token_ids: list[int]
    prompt_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Stage:
    """The folder in which the processes of one demo live, and what they are told."""

    folder: Path
    model: Path
    dtype: str
    environ: Mapping[str, str]
    """Secrets and tokens, by environment variable."""

    @classmethod
    def prepare(cls, folder: Path, model: Path, dtype: str) -> "Stage":
        """Makes up secrets and writes the pool's configuration."""
        environ = {}
        lines = ['[pool_service]\nlisten = ["127.0.0.1:0"]\ngrpc_listen = ["127.0.0.1:0"]\nhttp_listen = "127.0.0.1:0"']
        lines.append('memory_bytes = "1GiB"\ndisk_dir = "pool-disk"\ndisk_bytes = "2GiB"')
        for tenant in TENANTS:
            environ[f"DEMO_{tenant.upper()}_SECRET"] = secrets.token_hex(32)
            environ[f"DEMO_{tenant.upper()}_TOKEN"] = token = secrets.token_urlsafe(32)
            lines.append(f'[tenants.{tenant}]\ntoken_sha256 = ["{token_sha256(token)}"]')
        (folder / "pool.toml").write_text("\n".join(lines) + "\n")
        return cls(folder, model, dtype, environ)

    def pool(self) -> Service:
        """Starts the cache pool."""
        arguments = ["pool", "serve", "--config", str(self.folder / "pool.toml")]
        return Service(arguments, log=self.folder / "pool.log", environ={})

    def engine(self, name: str, *, tenant: str, pool_address: str | None, dtype: str | None = None) -> Service:
        """Starts an engine process; without an address it caches nothing at all."""
        config = self.folder / f"engine-{name}.toml"
        cache = f'[pool]\naddress = "{pool_address}"' if pool_address else ""
        config.write_text(
            f'tenant = "{tenant}"\n'
            f"[tenants.{tenant}]\n"
            f'secret = "env:DEMO_{tenant.upper()}_SECRET"\ntoken = "env:DEMO_{tenant.upper()}_TOKEN"\n'
            f'[engine]\nmodel = "{self.model}"\nlisten = "127.0.0.1:0"\ndtype = "{dtype or self.dtype}"\n'
            f"cache = {str(pool_address is not None).lower()}\n"
            f'[host]\ncapacity_bytes = "512MiB"\n{cache}\n'
        )
        arguments = ["engine", "serve", "--config", str(config)]
        return Service(arguments, log=self.folder / f"engine-{name}.log", environ=self.environ)


def ask(url: str, name: str, person: Person) -> Run:
    """One greedy chat completion."""
    body = {
        "messages": messages(person),
        "temperature": 0,
        "max_tokens": MAX_ANSWER_TOKENS,
        "return_prompt_token_ids": True,
    }
    answer: Any = post(f"{url}/v1/chat/completions", body)
    usage, extension = answer["usage"], answer["kvtier"]
    return Run(
        name=name,
        question=f"How old is {person.name}?",
        ttft_s=extension["ttft_s"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        cached_by_tier=usage["prompt_tokens_details"]["cached_tokens_by_tier"],
        answer=answer["choices"][0]["message"]["content"],
        answer_token_ids=extension["token_ids"],
        prompt_token_ids=extension["prompt_token_ids"],
    )


def run_all(stage: Stage, pool_address: str, note: Callable[[str], None]) -> list[Run]:
    """Cold, pool, device, other tenant, and the two questions without any cache, in this order."""
    runs = shared_prefix(stage, "", pool_address, stage.dtype, note)
    note("Engine C, tenant blue: must hit nothing")
    with stage.engine("c", tenant="blue", pool_address=pool_address) as engine:
        url = _url(engine)
        _warm_up(url)
        runs.append(ask(url, "other tenant", PEOPLE_ASKED[0]))
    note("Engine D, caching off: the judge of tokens")
    runs += judge(stage, "d", stage.dtype, note)
    return runs


def shared_prefix(stage: Stage, prefix: str, pool_address: str, dtype: str, note: Callable[[str], None]) -> list[Run]:
    """One engine computes, another pulls from the pool and then hits its own device."""
    first, second = PEOPLE_ASKED
    note("Engine A, tenant red: computes the document's KV")
    with stage.engine(f"{prefix}a", tenant="red", pool_address=pool_address, dtype=dtype) as engine:
        url = _url(engine)
        _warm_up(url)
        runs = [ask(url, "cold", first)]
    note("Engine B, a new process, tenant red: pulls it from the pool")
    with stage.engine(f"{prefix}b", tenant="red", pool_address=pool_address, dtype=dtype) as engine:
        url = _url(engine)
        _warm_up(url)
        runs.append(ask(url, "pool hit", second))
        note("Engine B again: still on its device")
        runs.append(ask(url, "device hit", second))
    return runs


def judge(stage: Stage, name: str, dtype: str, note: Callable[[str], None]) -> list[Run]:
    """Both questions without any cache."""
    with stage.engine(name, tenant="red", pool_address=None, dtype=dtype) as engine:
        url = _url(engine)
        _warm_up(url)
        return [ask(url, f"no cache, question {number}", person) for number, person in enumerate(PEOPLE_ASKED, 1)]


def _url(engine: Service) -> str:
    return engine.ready()["url"]


def _warm_up(url: str) -> None:
    """One short unrelated request: the first forward pass of a process pays for allocations once."""
    post(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 2, "temperature": 0})
