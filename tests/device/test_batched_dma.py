"""Transfers in batches, by a driver that stands for libcuda: what it is asked for, and when it is not asked."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cuda_rig import LANE_STREAM, Driver, Notes, Stream
from kvtier.device.batched_dma import BatchedDma

CPU = torch.device("cpu")


def addresses_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.data_ptr() + np.arange(tensor.size(0)) * tensor.stride(0)


@pytest.mark.parametrize(("from_host", "order"), [(True, 3), (False, 1)])
def test_a_batch_is_one_call(from_host: bool, order: int) -> None:
    """Host memory may be read at any time, what is on the device in the stream's order alone."""
    driver = Driver()
    dma = BatchedDma.of_driver(driver)
    assert dma is not None
    source, target = torch.arange(50, dtype=torch.uint8).view(5, 10), torch.zeros(5, 10, dtype=torch.uint8)
    sizes = np.array([1, 10, 3, 7, 2])
    dma.copy(addresses_of(target), addresses_of(source), sizes, LANE_STREAM, from_host=from_host)
    dma.copy(sizes[:0], sizes[:0], sizes[:0], LANE_STREAM, from_host=from_host)
    assert [call.order for call in driver.calls] == [order], "and none for nothing"
    assert driver.calls[0].sizes == sizes.tolist()


def test_the_first_of_many_transfers_are_copied_while_the_others_are_asked_for() -> None:
    driver = Driver()
    dma = BatchedDma.of_driver(driver)
    assert dma is not None
    source = torch.randint(0, 256, (5000, 3), dtype=torch.uint8)
    target = torch.zeros_like(source)
    dma.copy(addresses_of(target), addresses_of(source), np.full(5000, 3), LANE_STREAM, from_host=True)
    assert torch.equal(target, source)
    assert [len(call.sizes) for call in driver.calls] == [1024, 1536, 2304, 136]


def test_bytes_arrive() -> None:
    dma = BatchedDma.of_driver(Driver())
    assert dma is not None
    source, target = torch.arange(50, dtype=torch.uint8).view(5, 10), torch.zeros(5, 10, dtype=torch.uint8)
    dma.copy(addresses_of(target)[::-1].copy(), addresses_of(source), np.full(5, 4), LANE_STREAM, from_host=True)
    assert torch.equal(target[:, :4], source.flip(0)[:, :4])
    assert not target[:, 4:].any()


def test_a_refusal_says_what_was_refused() -> None:
    dma = BatchedDma.of_driver(Driver(status=700))
    assert dma is not None
    with pytest.raises(RuntimeError, match="CUDA error 700 for 1 transfers, at number 3"):
        dma.copy(*(np.array([1]) for _ in range(3)), LANE_STREAM, from_host=True)


def test_older_drivers_have_no_batches() -> None:
    assert BatchedDma.of_driver(Driver(find_status=500)) is None
    assert BatchedDma.of_driver(SimpleNamespace()) is None, "older than CUDA 12"


def test_it_is_tried_before_it_is_used(caplog: pytest.LogCaptureFixture) -> None:
    for driver, works, num_copies in (
        (Driver(), True, 2),  # of pinned memory, and of pageable memory
        (Driver(status=801), False, 0),
        (Driver(garbles=True), False, 1),
    ):
        caplog.clear()
        dma = BatchedDma.of_driver(driver)
        assert dma is not None
        cuda = Notes()
        with cuda.device(CPU), caplog.at_level(logging.WARNING):
            assert dma.works(CPU, Stream(cuda)) == works
        assert bool(caplog.records) != works
        assert [note[0] for note in cuda.notes] == ["synchronize"] * num_copies
