"""Which processes belong to one, and when they are at rest."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvtier.errors import KvtierError
from kvtier_bench.processes import family as module
from kvtier_bench.processes.family import await_rest, family

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=sys.stdin)
print(child.pid, flush=True)
child.wait()
"""
ASLEEP, BUSY = "import sys; sys.stdin.read()", "while True: pass"


def _parent(of_child: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, of_child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture(params=[ASLEEP, BUSY], ids=["asleep", "busy"])
def parent_and_child(request: pytest.FixtureRequest) -> Iterator[tuple[int, int, bool]]:
    with _parent(request.param) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        yield parent.pid, child, request.param == BUSY
        for pid in reversed(family(parent.pid)):
            subprocess.run(["kill", "-KILL", str(pid)], check=False)


def test_children_belong_to_their_parent_and_keep_it_from_rest(
    parent_and_child: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, child, is_busy = parent_and_child
    assert family(parent) == (parent, child)
    if not is_busy:
        await_rest(family(parent))
        return
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    with pytest.raises(KvtierError, match="have not come to rest"):
        await_rest(family(parent))


def test_a_process_that_has_ended_is_at_rest() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert family(ended.pid) == (ended.pid,)
    await_rest([ended.pid])
