"""Every target of `make fuzz` over its seeds and some hundred mutations of them, without atheris."""

import logging
import random
import resource
from collections.abc import Callable

import pytest

from fuzz_targets import TARGETS

NUM_MUTATIONS = {"disk": 20, "segment": 150, "pool": 250}
"""Mutations for targets that take longer than others. Two seconds for each target at the most."""
MOST_GROWTH_KIB = 256 << 10


@pytest.fixture(autouse=True)
def _no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands, of damage."""
    caplog.set_level(logging.ERROR)


def mutated(random_: random.Random, seed: bytes) -> bytes:
    """A seed with some bytes changed, cut out or put in."""
    data = bytearray(seed)
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        at = random_.randrange(len(data) + 1)
        removed = random_.choice((0, 1, 1, 1, 4, 100))
        data[at : at + removed] = random_.randbytes(random_.choice((0, 1, 1, 1, 2, 8)))
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_mutations_of_them_find_nothing(name: str) -> None:
    target, seed = TARGETS[name], random.randrange(1 << 30)
    print(f"seed {seed}")
    random_ = random.Random(seed)
    seeds = target.seeds()
    assert max(map(len, seeds)) <= target.max_bytes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with target.opened() as execute:
        for data in seeds if name != "disk" else seeds[::6]:
            execute(data)
        for _ in range(NUM_MUTATIONS.get(name, 400)):
            data = mutated(random_, random_.choice(seeds))
            try:
                execute(data)
            except BaseException:
                print(f"input {data.hex()}")
                raise
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_GROWTH_KIB


def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.common.packer.verify", lambda *arguments: None)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("stored", unverified),
        ("segment", unverified),
        ("redis", unverified),
    ],
)
def test_a_wrong_hit_is_noticed(
    name: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a check of kvtier's, a few mutations of valid blocks come back as hits, and the target says so."""
    plant(monkeypatch)
    target, random_ = TARGETS[name], random.Random(0)
    seeds = [seed for seed in target.seeds() if not seed[0] & 0x03]
    inputs = [mutated(random_, random_.choice(seeds)) for _ in range(3000)]
    with target.opened() as execute, pytest.raises(AssertionError, match="a wrong hit"):
        list(map(execute, inputs))
