"""Decodes replayed from graphs, with Triton kernels in the interpreter. A graph here runs its function once more."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine_rig import TOKENS_PER_BLOCK, EngineRig, judge
from kvtier_engine.model import decode_graphs, llama
from kvtier_engine.model.decode_graphs import GraphedModel, graph_sizes
from kvtier_engine.model.llama import Chunk
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv
from kvtier_kernels import SharedPrefixes, launching, tiles
from kvtier_kernels.attention import layer_attention
from tiny_model import CONFIG, VOCABULARY, prompt, tiny_model

MAX_SEQS, MAX_SEQ_LEN = 8, 40
NUM_BLOCKS = 96


class Replay:
    """Runs a function again, into the tensor that it gave first."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run
        self.result = run()
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.result.copy_(self._run())


class Recorded:
    """A recorder, and what it has made: the largest batch first."""

    def __init__(self) -> None:
        self.graphs: list[Replay] = []

    def record(self, run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        self.graphs.append(Replay(run))
        return self.graphs[-1], self.graphs[-1].result

    def replays(self) -> dict[int, int]:
        """By number of rows, of the graphs that were replayed."""
        return {len(graph.result): graph.num_replays for graph in self.graphs if graph.num_replays}


@pytest.fixture(autouse=True)
def _triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched decodes go through them as well."""
    monkeypatch.setattr(llama, "step_attention", layer_attention.step_with_triton)


@pytest.fixture
def kv() -> PagedKV:
    """Every slot that was not written is NaN."""
    kv = allocate_kv(CONFIG, NUM_BLOCKS, TOKENS_PER_BLOCK, torch.float32)
    kv.tensor.fill_(torch.nan)
    return kv


class Sequences:
    """So many, with KV for all but the last token of each, at lengths that differ."""

    def __init__(self, lengths: list[int], kv: PagedKV, seed: int = 0) -> None:
        self._model, self._kv = tiny_model(), kv
        free = iter(torch.randperm(kv.num_blocks, generator=torch.Generator().manual_seed(seed)).tolist())
        self.tokens = [prompt(length, seed=seed + row) for row, length in enumerate(lengths)]
        self.tables = [[next(free) for _ in range(-(-MAX_SEQ_LEN // TOKENS_PER_BLOCK))] for _ in lengths]
        self._model.forward(
            [
                Chunk(tokens[:-1], 0, table)
                for tokens, table in zip(self.tokens, self.tables, strict=True)
                if len(tokens) > 1
            ],
            kv,
        )

    def chunks(self, rows: list[int]) -> list[Chunk]:
        """The chunks of the next step of these rows, with no more blocks than they need."""
        return [
            Chunk(
                self.tokens[row][-1:],
                len(self.tokens[row]) - 1,
                self.tables[row][: -(-len(self.tokens[row]) // TOKENS_PER_BLOCK)],
            )
            for row in rows
        ]

    def append(self, rows: list[int], logits: Tensor) -> None:
        for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
            self.tokens[row].append(token)


def graphed_model(kv: PagedKV) -> tuple[GraphedModel, Recorded]:
    recorded = Recorded()
    return GraphedModel(tiny_model(), kv, recorded, max_seqs=MAX_SEQS, max_seq_len=MAX_SEQ_LEN), recorded


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """NaNs included."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_graphs_are_of_powers_of_two_and_the_most() -> None:
    assert [graph_sizes(number) for number in (1, 2, 3, 16, 20)] == [
        [1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 20],
    ]  # fmt: skip


def test_recording_touches_no_block(kv: PagedKV) -> None:
    before = kv.tensor.clone()
    _, recorded = graphed_model(kv)
    assert [len(graph.result) for graph in recorded.graphs] == [8, 4, 2, 1]
    assert same_bytes(kv.tensor, before)


@pytest.mark.parametrize("num_seqs", range(1, MAX_SEQS + 1))
def test_replayed_logits_and_kv_are_those_of_launching(kv: PagedKV, num_seqs: int) -> None:
    """Bit for bit in batches that fill a graph; with rows to spare, up to how matrix products round."""
    graphed, recorded = graphed_model(kv)
    sequences = Sequences([5, 1, 16, 39, 4, 8, 23, 13][:num_seqs], kv)
    chunks = sequences.chunks(list(range(num_seqs)))
    launched_kv = PagedKV(kv.tensor.clone())
    expected = tiny_model().forward(chunks, launched_kv)
    logits = graphed.forward(chunks, kv)
    (size,) = recorded.replays()
    assert size == min(size for size in (1, 2, 4, 8) if size >= num_seqs)
    assert logits.shape == (num_seqs, VOCABULARY)
    if size == num_seqs:
        assert torch.equal(logits, expected)
        assert same_bytes(kv.tensor, launched_kv.tensor)
    written = ~launched_kv.tensor.isnan()
    assert torch.equal(~kv.tensor.isnan(), written), "nothing but the new tokens' slots"
    assert (logits - expected).abs().max().item() < 1e-4
    assert (kv.tensor - launched_kv.tensor)[written].abs().max().item() < 1e-5


def test_batches_change_from_step_to_step(kv: PagedKV) -> None:
    """Sequences come and go, change their rows, and get blocks: nothing of an earlier step is left."""
    graphed, recorded = graphed_model(kv)
    sequences = Sequences([3, 4, 17, 30, 1, 12, 9, 25], kv, seed=5)
    rng = random.Random(3)
    for step in range(10):
        rows = rng.sample(range(8), rng.choice([1, 2, 4, 8]))
        chunks = sequences.chunks(rows)
        launched_kv = PagedKV(kv.tensor.clone())
        expected = tiny_model().forward(chunks, launched_kv)
        logits = graphed.forward(chunks, kv)
        assert torch.equal(logits, expected), f"step {step}"
        assert same_bytes(kv.tensor, launched_kv.tensor), f"step {step}"
        sequences.append(rows, logits)
    assert sum(recorded.replays().values()) == 10


def test_a_block_table_that_changed_in_its_midst_is_written_anew(kv: PagedKV) -> None:
    """As after a preemption: the same row, as many blocks, but others."""
    graphed, _ = graphed_model(kv)
    first, second = Sequences([17], kv, seed=5), Sequences([18], kv, seed=6)
    graphed.forward(first.chunks([0]), kv)
    mixed = Sequences([17], kv, seed=5)
    mixed.tokens, mixed.tables = second.tokens, [[*first.tables[0][:1], *second.tables[0][1:]]]
    kv.tensor[first.tables[0][0]] = kv.tensor[second.tables[0][0]]
    expected = tiny_model().forward(mixed.chunks([0]), kv)
    assert torch.equal(graphed.forward(mixed.chunks([0]), kv), expected)


@dataclass(frozen=True, slots=True)
class ArrivingKV(PagedKV):
    """KV whose layers come when they are asked for, one after the other."""

    source: Tensor

    @property
    def is_arriving(self) -> bool:
        return True

    def layer(self, index: int) -> Tensor:
        self.tensor[:, : index + 1] = self.source[:, : index + 1]
        return PagedKV.layer(self, index)


def test_a_step_that_may_wait_for_layers_is_launched(kv: PagedKV) -> None:
    graphed, recorded = graphed_model(kv)
    sequences = Sequences([17], kv)
    source = kv.tensor.clone()
    expected = tiny_model().forward(sequences.chunks([0]), PagedKV(source.clone()))
    kv.tensor.fill_(torch.nan)
    assert torch.equal(graphed.forward(sequences.chunks([0]), ArrivingKV(kv.tensor, source)), expected)
    assert not recorded.replays()


@pytest.mark.parametrize("what", ["a prefill", "too many", "too long", "other KV"])
def test_everything_else_is_launched(kv: PagedKV, what: str) -> None:
    graphed, recorded = graphed_model(kv)
    sequences = Sequences([5, 1, 16, 9, 4, 8, 23, 13, 2][: 9 if what == "too many" else 2], kv)
    chunks, target = sequences.chunks(list(range(len(sequences.tokens)))), kv
    if what == "a prefill":
        chunks = [Chunk(sequences.tokens[0], 0, sequences.tables[0]), *chunks[1:]]
    elif what == "too long":
        chunks[1] = Chunk(chunks[1].token_ids, chunks[1].start, [*sequences.tables[1], 95])
    elif what == "other KV":
        target = PagedKV(kv.tensor.clone())
    expected = tiny_model().forward(chunks, PagedKV(kv.tensor.clone()))
    assert torch.equal(graphed.forward(chunks, target), expected)
    assert not recorded.replays()


def test_decodes_over_shared_blocks_are_launched_where_that_pays(kv: PagedKV, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision is made by the tables and lengths of this very step."""
    asked: list[tuple[list[list[int]], list[int]]] = []
    pays = True

    def find(
        tables: Tensor, lens: Tensor, kv_layer: Tensor, _num_heads: int, *, replayed: bool = False
    ) -> SharedPrefixes | None:
        if replayed:
            asked.append((tables.tolist(), lens.tolist()))
        return SharedPrefixes.of(tables, lens, kv_layer.size(2)) if pays else None

    monkeypatch.setattr(decode_graphs, "find_shared_prefixes", find)
    monkeypatch.setattr(llama, "find_shared_prefixes", find)
    graphed, recorded = graphed_model(kv)
    sequences = Sequences([9, 9], kv)
    kv.tensor[sequences.tables[1][:2]] = kv.tensor[sequences.tables[0][:2]]
    sequences.tables[1][:2] = sequences.tables[0][:2]
    chunks = sequences.chunks([0, 1])
    shared = graphed.forward(chunks, kv).clone()
    assert asked == [([list(chunk.block_table) for chunk in chunks], [9, 9])]
    assert not recorded.replays()
    pays = False
    assert (graphed.forward(chunks, kv) - shared).abs().max().item() < 1e-4
    assert recorded.replays() == {2: 1}


def test_long_sequences_beside_short_ones_are_cut_into_runs(kv: PagedKV, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph's runs are those of no particular lengths: some are empty, and rows to spare have none."""
    monkeypatch.setattr(tiles, "_KEYS_PER_SPLIT", 16)
    monkeypatch.setattr(launching, "num_multiprocessors", lambda _device: 16)
    tiles.decode_splits.cache_clear()
    assert tiles.decode_runs_of_any_length(8, CONFIG.num_key_value_heads, MAX_SEQ_LEN, 16) == (3, 16)
    graphed, recorded = graphed_model(kv)
    sequences = Sequences([39, 1, 16, 17, 33], kv)
    chunks = sequences.chunks([0, 1, 2, 3, 4])
    expected = tiny_model().forward(chunks, PagedKV(kv.tensor.clone()))
    assert (graphed.forward(chunks, kv) - expected).abs().max().item() < 1e-4
    assert recorded.replays() == {8: 1}
    tiles.decode_splits.cache_clear()


@pytest.fixture
def rig() -> Iterator[EngineRig]:
    rig = EngineRig(tiers=False, num_blocks=40, max_running=5)
    yield rig
    rig.close()


def test_an_engine_answers_the_same(rig: EngineRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come and go, prefill beside others, and share what they cached."""
    recorded = Recorded()
    rig.scheduler._model = GraphedModel(tiny_model(), rig.kv, recorded, max_seqs=5, max_seq_len=MAX_SEQ_LEN)
    document = prompt(13, seed=9)
    prompts = [document + prompt(2 + row, seed=row) for row in range(4)] + [prompt(6, seed=20), prompt(3, seed=21)]
    for each in prompts[:3]:
        rig.add(each, max_tokens=7)
    rig.run_until(lambda: bool(rig.done))
    for each in prompts[3:]:
        rig.add(each, max_tokens=4)
    rig.run()
    monkeypatch.undo()
    for row, each in enumerate(prompts):
        assert rig.done[row + 1].token_ids == judge(each, 7 if row < 3 else 4)
    assert sum(recorded.replays().values()) > 6
