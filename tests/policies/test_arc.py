"""ARC against figure 4 of the paper, written down line by line over plain lists."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.policies.arc import ARC
from kvtier.policies.base import UNKNOWN_USE


class Paper:
    """Lists have their LRU end at the index 0. In cases II and III the paper adapts p before REPLACE; here it is after,
    and REPLACE is not told of a ghost in B2: the victim is chosen before its successor is known."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def request(self, x: int) -> None:
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:
            self.replace()
            # REPLACE may have made a ghost, which the ratio counts with those that were there.
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.replace()
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.b2.remove(x)
            self.t2.append(x)
        else:
            self.miss(x)

    def miss(self, x: int) -> None:
        known = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.pop(0)
                self.replace()
            else:
                self.t1.pop(0)
        elif known >= self.c:
            if known == 2 * self.c:
                self.b2.pop(0)
            self.replace()
        self.t1.append(x)

    def replace(self) -> None:
        if len(self.t1) + len(self.t2) < self.c:
            return
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


@given(size=st.integers(1, 12), keys=st.lists(st.integers(0, 30), max_size=300))
def test_it_holds_what_the_paper_holds(size: int, keys: list[int]) -> None:
    paper, policy = Paper(size), ARC[int]()
    for key in keys:
        paper.request(key)
        if key in policy:
            policy.touch(key, UNKNOWN_USE)
        else:
            if len(policy) == size:
                policy.remove(policy.coldest(1)[0], evicted=True)
            policy.insert(key, UNKNOWN_USE)
        assert {key for key in range(31) if key in policy} == {*paper.t1, *paper.t2}
