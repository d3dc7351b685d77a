"""What the demo does, in order, and what came of it."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as FilePath

from kvtier.system.processes import Service
from kvtier.system.redis_process import redis_binary, redis_process
from kvtier_engine.demo.ask import Answer, chat, post
from kvtier_engine.demo.conversation import Turn, converse
from kvtier_engine.demo.failures import Death, Failures, Return
from kvtier_engine.demo.judge import Verdict, judge
from kvtier_engine.demo.paths import Document, Path, measure_paths
from kvtier_engine.demo.site import Site
from kvtier_engine.demo.stage import Stage
from kvtier_engine.model.model_config import ModelConfig

_REDIS_BYTES = 2**30
_ISOLATED_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Size:
    """How much the demo does of everything."""

    num_people: int
    """The people in a document, 50 tokens each."""
    num_documents: int
    num_prompts: int
    """Judged, in each dtype."""


FULL = Size(num_people=60, num_documents=3, num_prompts=20)
QUICK = Size(num_people=13, num_documents=2, num_prompts=2)


@dataclass(frozen=True, slots=True)
class Story:
    """All that the demo has seen."""

    paths: list[Path]
    other_tenant: Answer
    turns: list[Turn]
    restart: Return
    death: Death
    redis: Return | None
    """None where no Redis is installed."""
    verdicts: list[Verdict]

    @property
    def prompt_tokens(self) -> int:
        return self.paths[0].answers[0].prompt_tokens


def tell(stage: Stage, model: ModelConfig, size: Size, note: Callable[[str], None]) -> Story:
    """Runs everything in processes of its own; all of them have ended when it returns or raises.

    :param note: called with what begins.
    :raises KvtierError: a process does not start, does not answer or ends badly.
    """
    with _redis(stage.folder) as redis_url, Site(stage, redis_url) as site:
        note("A pool starts")
        site.start()
        documents = [Document.make(edition, size.num_people) for edition in range(size.num_documents)]
        note("Three engines start")
        with _engines(stage, site, _document_bytes(model, size)) as (shared, remote, other):
            paths = measure_paths(shared, remote, site, documents, note)
            note("Engine C, of another tenant, is asked about a document")
            other_tenant = chat(other, documents[0].question(0), _ISOLATED_TOKENS)
            note("Six turns of a conversation, over engines A and B in turn")
            turns = converse((shared, remote), site)
            failures = Failures(site, shared, remote, documents)
            failures.prepare()
            note("The pool is restarted")
            restart = failures.restart()
            note("The pool is killed")
            death = failures.kill()
            note("Another pool, with an empty disk and the same Redis")
            redis = failures.move() if redis_url else None
        verdicts = judge(stage, site, size.num_prompts, note)
    return Story(paths, other_tenant, turns, restart, death, redis, verdicts)


def _document_bytes(model: ModelConfig, size: Size) -> int:
    """Bytes of KV of a document, in bfloat16."""
    per_token = 2 * 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    return 50 * size.num_people * per_token


@contextmanager
def _redis(folder: FilePath) -> Iterator[str | None]:
    binary = redis_binary()
    if binary is None:
        yield None
        return
    with redis_process(binary, folder, _REDIS_BYTES) as (url, _):
        yield url


@contextmanager
def _engines(stage: Stage, site: Site, document_bytes: int) -> Iterator[tuple[str, ...]]:
    """A and B of tenant red, and C of tenant blue; they start at the same time. Gives their URLs.

    A's device has room for a document and a half, so that it gives up the one before; B's has room for all.
    """
    with contextlib.ExitStack() as stack:
        services: list[Service] = [
            stack.enter_context(stage.engine(name, tenant=tenant, pool_address=address, settings=settings))
            for name, tenant, address, settings in (
                ("a", "red", site.unix, {"kv_bytes": document_bytes * 3 // 2}),
                ("b", "red", site.tcp, {"kv_bytes": document_bytes * 6}),
                ("c", "blue", site.tcp, {"kv_bytes": document_bytes * 2}),
            )
        ]
        urls = tuple(service.ready()["url"] for service in services)
        for url in urls:  # the first forward pass of a process pays for allocations once
            post(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 2, "temperature": 0})
        yield urls
