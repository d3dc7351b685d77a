"""On a machine with a GPU: the kernels as they are compiled there, real streams, and the engine's forward pass."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine_rig import TOKENS_PER_BLOCK
from kvtier.device.batched_dma import BatchedDma
from kvtier.device.kv import Blocks
from kvtier.device.pinned_memory import pins_read_only
from kvtier.memory.arena import Arena
from kvtier_bench.gpu.measuring.host_copies import lent_by
from kvtier_bench.gpu.measuring.models import random_weights
from kvtier_engine.model.cuda_graphs import with_cuda_graphs
from kvtier_engine.model.devices import device_kv, weights_on
from kvtier_engine.model.llama import Chunk, LlamaModel
from kvtier_engine.model.paged_kv import PagedKV, allocate_kv
from kvtier_kernels.records import LossyCodec
from kvtier_kernels.selfcheck.command import run_checks
from tiny_model import CONFIG, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
HELD_BACK_CYCLES = 200_000_000
"""About a tenth of a second: what the engine's stream holds is certainly not done when a copy is asked for."""
SLOTS = [30, 2, 3, 4, 17, 0]

if torch.cuda.is_available():
    # Before any test begins: what the driver opens with a context stays as long as the process, and is no test's leak.
    torch.ones(1).pin_memory().to(CUDA).cpu()


def test_every_kernel_agrees_with_its_reference() -> None:
    assert {name: failure for name, failure in run_checks(CUDA) if failure} == {}


@pytest.fixture(params=["direct", "staged, by batches", "staged, by kernel", "staged, one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a `CudaKV` that is made from now on brings blocks across the bus. The blocks of the tests are small."""
    way = str(request.param)
    monkeypatch.setattr("kvtier.device.cuda.LEAST_PART_BYTES", 1 if way == "direct" else 2**20)
    monkeypatch.setattr("kvtier.device.cuda_routes.LEAST_PART_BYTES", 2**20 if way == "staged, by kernel" else 1)
    if way == "staged, one by one":
        monkeypatch.setattr("kvtier.device.cuda_routes.LEAST_DMA_BYTES", 1)
        monkeypatch.setattr(BatchedDma, "of_driver", lambda _driver: None)
    elif BatchedDma.of_driver() is None:
        pytest.skip("the driver is older than CUDA 12.8")
    return way


def test_the_driver_copies_in_batches() -> None:
    dma = BatchedDma.of_driver()
    if dma is None:
        pytest.skip("the driver is older than CUDA 12.8")
    stream = torch.cuda.Stream(CUDA)
    with torch.cuda.stream(stream):
        assert dma.works(CUDA, stream)


def test_blocks_come_back_as_they_went(way: str) -> None:
    kv = allocate_kv(CONFIG, 40, TOKENS_PER_BLOCK, torch.bfloat16, CUDA)
    kv.byte_rows().random_(0, 256)
    before = kv.byte_rows().cpu()
    arena = Arena(20, kv.block_bytes)
    arena_slots = [9, 10, 11, 3, 19, 0]
    with device_kv(kv, num_copies=3) as mover_side:
        mover_side.gather(SLOTS, arena, arena_slots, after=mover_side.fence())
        assert np.array_equal(arena.rows[arena_slots], before[SLOTS].numpy())
        kv.byte_rows().zero_()
        mover_side.scatter(arena, arena_slots, SLOTS, after=mover_side.fence())
        after = kv.byte_rows().cpu()
    expected = torch.zeros_like(before)
    expected[SLOTS] = before[SLOTS]
    assert torch.equal(after, expected)


def test_blocks_come_from_memory_that_is_mapped_for_reading(way: str) -> None:
    """As from a pool on the same host; attached again after it was given back, at the same address maybe."""
    if not pins_read_only(CUDA):
        pytest.skip("the driver does not pin what is mapped for reading")
    kv = allocate_kv(CONFIG, 40, TOKENS_PER_BLOCK, torch.bfloat16, CUDA)
    arena = Arena(20, kv.block_bytes, shared=True)
    slots = [9, 10, 11, 3, 19, 0]
    with device_kv(kv, num_copies=3) as mover_side:
        for seed in range(2):
            arena.rows[:] = np.random.default_rng(seed).integers(0, 256, arena.rows.shape, dtype=np.uint8)
            kv.byte_rows().zero_()
            with lent_by(arena, mover_side) as leased:
                assert not leased.rows.flags.writeable
                mover_side.scatter_all(
                    [Blocks(leased, slots[:2], SLOTS[:2]), Blocks(leased, slots[2:], SLOTS[2:])],
                    after=mover_side.fence(),
                )
            assert np.array_equal(kv.byte_rows().cpu()[SLOTS].numpy(), arena.rows[slots])
    arena.close()


@pytest.mark.parametrize("codec", LossyCodec)
def test_blocks_in_the_form_of_a_codec_are_those_of_an_engine_on_cpu(codec: LossyCodec) -> None:
    kv, on_cpu = (allocate_kv(CONFIG, 40, TOKENS_PER_BLOCK, torch.bfloat16, device) for device in (CUDA, CPU))
    kv.tensor.normal_()
    on_cpu.tensor.copy_(kv.tensor)
    arenas, arena_slots = [], [9, 10, 11, 3, 19, 0]
    for of in (kv, on_cpu):
        with device_kv(of, num_copies=1, lossy_codec=codec) as mover_side:
            arenas.append(Arena(20, mover_side.block_bytes))
            mover_side.gather(SLOTS, arenas[-1], arena_slots, after=mover_side.fence())
            mover_side.scatter(arenas[-1], arena_slots, SLOTS, after=mover_side.fence())
    assert np.array_equal(arenas[0].rows, arenas[1].rows)
    assert torch.equal(kv.tensor.cpu(), on_cpu.tensor)


def test_copies_wait_for_what_the_engine_has_under_way(way: str) -> None:
    kv = allocate_kv(CONFIG, 40, TOKENS_PER_BLOCK, torch.bfloat16, CUDA)
    arena = Arena(20, kv.block_bytes)
    slots = list(range(len(SLOTS)))
    with device_kv(kv, num_copies=3) as mover_side:
        mover_side.gather(SLOTS, arena, slots, after=mover_side.fence())
        torch.cuda._sleep(HELD_BACK_CYCLES)
        kv.byte_rows().fill_(7)
        mover_side.gather(SLOTS, arena, slots, after=mover_side.fence())
        assert (arena.rows[slots] == 7).all()

        arena.rows[:] = 9
        torch.cuda._sleep(HELD_BACK_CYCLES)
        read_before = kv.byte_rows()[SLOTS]
        mover_side.scatter(arena, slots, SLOTS, after=mover_side.fence())
        assert (read_before == 7).all()
        assert (kv.byte_rows()[SLOTS] == 9).all()


def test_replayed_decodes_give_what_launched_ones_give() -> None:
    """Batches of all sizes in turn, so that each graph runs after others have used their common memory."""
    model = LlamaModel(CONFIG, weights_on(tiny_model()._weights, CUDA))
    kv = allocate_kv(CONFIG, 100, TOKENS_PER_BLOCK, torch.float32, CUDA)
    kv.tensor.fill_(float("nan"))
    graphed = with_cuda_graphs(model, kv, max_seqs=5, max_seq_len=60)
    assert kv.tensor.isnan().all(), "no block is touched"
    generator = torch.Generator().manual_seed(1)
    lengths, order = [3, 16, 41, 1, 30], torch.randperm(100, generator=generator).tolist()
    tables = [order[15 * row : 15 * row + 15] for row in range(5)]
    tokens = [torch.randint(0, CONFIG.vocab_size, (of,), generator=generator).tolist() for of in lengths]
    for row in (0, 1, 2, 4):
        model.forward([Chunk(tokens[row][:-1], 0, tables[row])], kv)
    for num_seqs in (5, 1, 3, 2, 4, 5, 1, 2):
        chunks = [Chunk(tokens[row][-1:], len(tokens[row]) - 1, tables[row]) for row in range(num_seqs)]
        expected = model.forward(chunks, PagedKV(kv.tensor.clone())).cpu()
        logits = graphed.forward(chunks, kv).cpu()
        assert (logits - expected).abs().max().item() < 1e-3
        for row, token in enumerate(logits.argmax(-1).tolist()):
            tokens[row].append(token)


def test_the_forward_pass_gives_what_it_gives_on_cpu() -> None:
    """Prefill, prefill over a cached prefix, decode; two sequences."""
    ids = torch.randint(0, CONFIG.vocab_size, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    tables = list(range(20)), list(range(39, 19, -1))
    cuts = [(0, 17), (17, 45), (45, 46), (46, 60)]
    logits = []
    for device in (CPU, CUDA):
        model = LlamaModel(CONFIG, weights_on(tiny_model()._weights, device))
        kv = allocate_kv(CONFIG, 40, TOKENS_PER_BLOCK, torch.float32, device)
        kv.tensor.fill_(float("nan"))
        steps = [model.forward([Chunk(ids[a:b], a, table) for table in tables], kv).cpu() for a, b in cuts]
        logits.append(torch.stack(steps))
    assert (logits[0] - logits[1]).abs().max().item() < 1e-3


def test_an_invariant_model_has_the_same_bits_cold_cached_chunked_batched_and_replayed() -> None:
    """In bfloat16, with layers large enough for several tiles of products and of keys."""
    config = replace(CONFIG, hidden_size=512, intermediate_size=768, num_attention_heads=8, head_dim=64)
    tokens = torch.randint(0, config.vocab_size, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    model = LlamaModel(config, random_weights(config, torch.bfloat16, CUDA), batch_invariant=True)
    kv = allocate_kv(config, 100, TOKENS_PER_BLOCK, torch.bfloat16, CUDA)
    graphed = with_cuda_graphs(model, kv, max_seqs=5, max_seq_len=len(tokens))
    table, others = list(range(75)), [Chunk([9], 0, [75 + row]) for row in range(4)]
    kv.tensor.fill_(float("nan"))
    expected, whole = model.forward([Chunk(tokens, 0, table)], kv)[-1].clone(), kv.tensor[:75].clone()
    assert expected.isfinite().all()
    assert whole.isfinite().all()
    for forward, cuts, beside in (
        (model.forward, (0, 1, 130, 297, 298, 299, 300), []),
        (model.forward, (0, 200, 299, 300), others),
        (graphed.forward, (0, 297, 298, 299, 300), others[:2]),
    ):
        kv.tensor.fill_(float("nan"))
        for start, stop in itertools.pairwise(cuts):
            logits = forward([*beside, Chunk(tokens[start:stop], start, table)], kv)[-1]
        assert torch.equal(logits, expected)
        assert torch.equal(kv.tensor[:75], whole)
