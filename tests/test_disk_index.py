"""The disk tier's index in memory: right, small."""

import random

import numpy as np
import pytest

from kvtier.tiers.disk_log.index import RECORD, RecordIndex, tags_of


class TestIndex:
    @pytest.mark.parametrize("seed", [1, 2])
    def test_against_a_dict(self, seed: int) -> None:
        order, index, oracle = random.Random(seed), RecordIndex(), dict[bytes, int]()
        for step in range(600):
            keys = list({b"%d" % order.randrange(2000) for _ in range(order.randrange(60))})
            tags = tags_of(keys, seed)
            rows = index.find(tags)
            assert [bool(row >= 0) for row in rows] == [key in oracle for key in keys]
            known = rows[rows >= 0]
            assert index.records(known)["page"].tolist() == [oracle[key] for key in keys if key in oracle]
            if order.random() < 0.6:
                new = np.zeros(int((rows < 0).sum()), RECORD)
                new["tag"], new["page"] = tags[rows < 0], step
                index.insert(new)
                oracle |= {key: step for key in keys if key not in oracle}
            else:
                index.remove(known)
                for key in keys:
                    oracle.pop(key, None)
            if step % 50 == 0:
                index.check()
        assert len(index) == len(oracle)

    def test_takes_64_bytes_per_record_at_the_most(self) -> None:
        index = RecordIndex()
        rng = np.random.default_rng(0)
        for number in range(1, 400):
            records = np.zeros(500, RECORD)
            records["tag"] = rng.integers(0, 2**64, (500, 2), dtype=np.uint64)
            index.insert(records)
            assert index.nbytes <= 64 * len(index), number
