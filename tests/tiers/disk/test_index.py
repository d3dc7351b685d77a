"""The disk tier's index in memory: it is right, small, and holds nobody up when it grows."""

import random

import numpy as np
import pytest

from kvtier.tiers.disk.state import tag_table
from kvtier.tiers.disk.state.index import RECORD, RecordIndex, tags_of
from kvtier.tiers.disk.state.tag_table import Rows, Tags, TagTable


class TestIndex:
    @pytest.mark.parametrize("seed", [1, 2])
    @pytest.mark.parametrize("step", [tag_table._STEP, 8])
    def test_against_a_dict(self, monkeypatch: pytest.MonkeyPatch, seed: int, step: int) -> None:
        monkeypatch.setattr(tag_table, "_STEP", step)
        monkeypatch.setattr(tag_table, "_STEP_PER_ROW", step // 8)
        num_growing = 0
        order, index, oracle = random.Random(seed), RecordIndex(), dict[bytes, int]()
        for number in range(600):
            keys = list({b"%d" % order.randrange(2000) for _ in range(order.randrange(60))})
            tags = tags_of(keys, seed)
            rows = index.find(tags)
            assert [bool(row >= 0) for row in rows] == [key in oracle for key in keys]
            known = rows[rows >= 0]
            assert index.records(known)["page"].tolist() == [oracle[key] for key in keys if key in oracle]
            if order.random() < 0.6:
                new = np.zeros(int((rows < 0).sum()), RECORD)
                new["tag"], new["page"] = tags[rows < 0], number
                index.insert(new)
                oracle |= {key: number for key in keys if key not in oracle}
            else:
                index.remove(known)
                for key in keys:
                    oracle.pop(key, None)
            num_growing += index._table._old is not None
            if number % 50 == 0:
                index.check()
        assert len(index) == len(oracle)
        assert (num_growing > 100) == (step == 8), "many steps were taken while it grew"

    def test_takes_64_bytes_per_record_at_the_most(self) -> None:
        index = RecordIndex()
        rng = np.random.default_rng(0)
        for number in range(1, 400):
            records = np.zeros(500, RECORD)
            records["tag"] = rng.integers(0, 2**64, (500, 2), dtype=np.uint64)
            index.insert(records)
            assert index.nbytes <= 64 * len(index), number

    def test_grows_a_step_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many records there are, an insertion places few of them and makes few rows."""
        placed: list[int] = []
        place = TagTable._place

        def counting(table: TagTable, rows: Rows, known: Tags) -> None:
            placed[-1] += len(rows)
            place(table, rows, known)

        monkeypatch.setattr(TagTable, "_place", counting)
        index, rng = RecordIndex(), np.random.default_rng(0)
        most_rows = 0
        for _ in range(1600):
            records = np.zeros(256, RECORD)
            records["tag"] = rng.integers(0, 2**64, (256, 2), dtype=np.uint64)
            before = len(index._rows)
            placed.append(0)
            index.insert(records)
            most_rows = max(most_rows, len(index._rows) - before)
        assert sum(placed) > 1.5 * len(index), "it has grown"
        assert max(placed) <= 256 + 4096 + 16 * 256
        assert most_rows <= 2**16
        index.check()
