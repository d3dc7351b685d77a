"""S3-FIFO against algorithm 1 of the paper, written down line by line over plain lists."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies.base import UNKNOWN_USE
from kvtier.policies.s3fifo import S3FIFO


class Paper:
    """Queues are lists whose tail, in the words of the paper, is at the index 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.s: list[int] = []
        self.m: list[int] = []
        self.g: list[int] = []
        self.freq: dict[int, int] = {}

    def read(self, x: int) -> None:
        if x in self.s or x in self.m:
            self.freq[x] = min(self.freq[x] + 1, 3)
        else:
            self.insert(x)
            self.freq[x] = 0

    def insert(self, x: int) -> None:
        while len(self.s) + len(self.m) >= self.size:
            self.evict()
        if x in self.g:
            self.g.remove(x)
            self.m.append(x)
        else:
            self.s.append(x)

    def evict(self) -> None:
        if self.s and (len(self.s) >= 0.1 * self.size or not self.m):
            self.evict_s()
        else:
            self.evict_m()

    def evict_s(self) -> None:
        """The paper goes on with S after a promotion; here the caller asks again which queue is too long."""
        t = self.s.pop(0)
        if self.freq[t] > 1:
            self.m.append(t)
            self.freq[t] = 0
        else:
            self.g.append(t)
            self.g = self.g[-self.size :]  # the paper: as many as M has room for

    def evict_m(self) -> None:
        evicted = False
        while not evicted and self.m:
            t = self.m.pop(0)
            if self.freq[t] > 0:
                self.m.append(t)
                self.freq[t] -= 1
            else:
                evicted = True


@given(size=st.integers(1, 25), keys=st.lists(st.integers(0, 40), max_size=300))
def test_it_holds_what_the_paper_holds(size: int, keys: list[int]) -> None:
    paper, policy = Paper(size), S3FIFO[int]()
    for key in keys:
        paper.read(key)
        if key in policy:
            policy.touch(key, UNKNOWN_USE)
        else:
            if len(policy) == size:
                policy.remove(policy.coldest(1)[0], evicted=True)
            policy.insert(key, UNKNOWN_USE)
        assert {key for key in range(41) if key in policy} == {*paper.s, *paper.m}


def test_many_are_not_looked_for_past_all_that_have_earned_to_stay() -> None:
    policy = S3FIFO[int]()
    for _ in range(4):
        for key in range(5000):
            (policy.touch if key in policy else policy.insert)(key, UNKNOWN_USE)
    assert policy.coldest(2) == []
    assert len(policy.coldest(1)) == 1
