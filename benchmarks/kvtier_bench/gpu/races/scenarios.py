"""What has gone wrong in the field: some blocks are computed, saved, given to others and restored.

What a round restores is compared on the device, in a step like any other, and the next round begins without waiting.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtier_bench.gpu.races.lender import POOL
from kvtier_bench.gpu.races.rig import Rig

_LONG_S = 0.003
"""How long a stream is held up: longer than the copies of a round take."""

Round = Callable[[Rig, int], None]
"""Plays a round with its number, by which wrong blocks are counted."""


def delayed_store(rig: Rig, number: int) -> None:
    """The step that computes the blocks runs long after their save was handed over."""
    blocks, slots = rig.blocks(), rig.slots()
    contents = rig.work.contents(blocks)
    save = rig.save(blocks, slots, rig.work.hold_up(_LONG_S), rig.work.write(blocks, contents))
    rig.until_over(save)
    rig.give_back(blocks=blocks)
    rig.restore(number, slots, contents)
    rig.give_back(slots=slots)


def delayed_load(rig: Rig, number: int) -> None:
    """Blocks are loaded to where a step still reads, which runs long after the load was handed over."""
    blocks, slots = rig.blocks(), rig.slots()
    contents, former = rig.work.contents(blocks), rig.work.contents(blocks)
    rig.until_over(rig.save(blocks, slots, rig.work.write(blocks, contents)))
    rig.engine.step(rig.work.write(blocks, former))
    rig.engine.step(rig.work.hold_up(_LONG_S), rig.work.check(number, blocks, former))
    rig.restore_into(number, blocks, slots, contents)
    rig.give_back(blocks=blocks, slots=slots)


def freed_late(rig: Rig, number: int) -> None:
    """Blocks are loaded to where the last processed step has left work that is not over, beside queued steps."""
    blocks, slots = rig.blocks(), rig.slots()
    contents, former = rig.work.contents(blocks), rig.work.contents(blocks)
    rig.until_over(rig.save(blocks, slots, rig.work.write(blocks, contents)))
    left = [rig.work.hold_up(_LONG_S), rig.work.check(number, blocks, former)]
    rig.engine.step(rig.work.write(blocks, former), tail=left)
    for _ in range(2):  # after which that step is processed
        rig.engine.step(rig.work.hold_up(_LONG_S))
    load = rig.engine.load(slots, blocks)
    rig.engine.step(rig.work.hold_up(_LONG_S), takes=blocks, messages=[load], after_processed=True)
    rig.compare(number, load, contents)
    rig.give_back(blocks=blocks, slots=slots)


def layer_by_layer(rig: Rig, number: int) -> None:
    """Blocks are computed with while their layers come, and given to others before all have come."""
    blocks, slots = rig.blocks(), rig.slots()
    contents, former, later = (rig.work.contents(blocks) for _ in range(3))
    rig.until_over(rig.save(blocks, slots, rig.work.write(blocks, contents)))
    rig.engine.step(rig.work.write(blocks, former))
    rig.engine.step(rig.work.hold_up(_LONG_S), rig.work.check(number, blocks, former))
    if rig.layered is None:
        rig.restore_into(number, blocks, slots, contents)
    else:
        load = rig.engine.load(slots, blocks, by_layer=True)
        rig.engine.step(takes=blocks, messages=[load])
        rig.engine.result(load)  # and no step, whose fence would wait for the layers
        layers, wait = rig.layered.num_layers, rig.layered.wait
        if number % 2:  # the other rounds do without, as when the request was cancelled: only the fence is left
            rig.engine.step_without_fence(*rig.work.check_layers(number, blocks, contents, layers, wait))
    others = rig.slots()
    rig.until_over(rig.save(blocks, others, rig.work.write(blocks, later)))
    rig.engine.step(rig.work.hold_up(_LONG_S), rig.work.check(number, blocks, later))
    rig.engine.until_arrived()
    rig.restore(number, others, later)
    rig.give_back(blocks=blocks, slots=[*slots, *others])


def zeroing(rig: Rig, number: int) -> None:
    """Blocks are zeroed when they are handed out, long after the load into them was handed over."""
    blocks, slots = rig.blocks(), rig.slots()
    contents = rig.work.contents(blocks)
    rig.until_over(rig.save(blocks, slots, rig.work.zero(blocks), rig.work.write(blocks, contents)))
    rig.restore_into(number, blocks, slots, contents, rig.work.hold_up(_LONG_S), rig.work.zero(blocks))
    rig.give_back(blocks=blocks, slots=slots)


def reuse(rig: Rig, number: int) -> None:
    """Steps compute the same blocks anew, time and again, while saves of these blocks are on their way."""
    blocks, saved = rig.blocks(), []
    for _ in range(3):
        slots, contents = rig.slots(), rig.work.contents(blocks)
        saved.append((rig.save(blocks, slots, rig.work.write(blocks, contents)), slots, contents))
    rig.give_back(blocks=blocks)
    for save, slots, contents in saved:
        rig.until_over(save)
        rig.restore(number, slots, contents)
        rig.give_back(slots=slots)


def preemption(rig: Rig, number: int) -> None:
    """A request loses its blocks while steps of it are queued and saves on their way: another's are loaded there."""
    theirs, slots = rig.blocks(), rig.slots()
    contents = rig.work.contents(theirs)
    rig.until_over(rig.save(theirs, slots, rig.work.write(theirs, contents)))
    rig.give_back(blocks=theirs)
    victims, victims_slots = rig.blocks(), rig.slots()
    victims_contents = rig.work.contents(victims)
    save = rig.save(victims, victims_slots, rig.work.hold_up(_LONG_S), rig.work.write(victims, victims_contents))
    rig.engine.step(rig.work.hold_up(_LONG_S / 2), rig.work.check(number, victims, victims_contents))
    if rig.numbers.random() < 0.5:  # as engines do that process a step before they hand out what it used
        rig.engine.process_steps()
    rig.restore_into(number, victims, slots, contents)
    rig.until_over(save)
    rig.give_back(blocks=victims)
    rig.restore(number, victims_slots, victims_contents)
    rig.give_back(slots=[*slots, *victims_slots])


def cancelled(rig: Rig, number: int) -> None:
    """A load is cancelled, mostly before its turn, and its blocks are computed as soon as the mover keeps off them."""
    blocks, slots, others = rig.blocks(), rig.slots(), rig.blocks()
    contents, later = rig.work.contents(blocks), rig.work.contents(blocks)
    rig.until_over(rig.save(blocks, slots, rig.work.write(blocks, contents)))
    first, second = rig.engine.load(slots, others), rig.engine.load(slots, blocks)
    rig.engine.step(rig.work.hold_up(_LONG_S), takes=[*blocks, *others], messages=[first, second])
    for _ in range(rig.numbers.randrange(3)):
        rig.chip.pause()
    rig.engine.cancel(second)
    if rig.until_over(second):
        rig.engine.step(rig.work.check(number, blocks, contents))
    rig.engine.step(rig.work.write(blocks, later), takes=blocks)
    rig.compare(number, first, contents)
    for _ in range(3):
        rig.engine.step(rig.work.hold_up(_LONG_S / 4))
    rig.engine.step(rig.work.check(number, blocks, later))
    rig.give_back(blocks=[*others, *blocks], slots=slots)


def several_streams(rig: Rig, number: int) -> None:
    """The engine goes from stream to stream. It orders its own work, and tells the mover nothing."""
    cuda, device = rig.chip.cuda, rig.chip.device
    for stream in rig.streams:
        stream.wait_stream(cuda.current_stream(device))
        with cuda.stream(stream):
            delayed_store(rig, number)
            delayed_load(rig, number)
        cuda.current_stream(device).wait_stream(stream)


def graphs(rig: Rig, number: int) -> None:
    """Steps are replays of one that was captured. Tensors that stay in their place say what is computed, and where."""
    blocks, slots = rig.blocks(), rig.slots()
    contents, former = rig.work.contents(blocks), rig.work.contents(blocks)
    save = rig.save(blocks, slots, rig.work.hold_up(_LONG_S), rig.work.replay(blocks, contents))
    rig.engine.step(rig.work.replay(blocks, former), takes=blocks)
    rig.until_over(save)
    rig.engine.step(rig.work.hold_up(_LONG_S), rig.work.check(number, blocks, former))
    rig.restore_into(number, blocks, slots, contents)
    rig.give_back(blocks=blocks, slots=slots)


def several_groups(rig: Rig, number: int) -> None:
    """Batches have blocks of two KV groups, one larger than the other's."""
    delayed_store(rig, number)
    delayed_load(rig, number)
    reuse(rig, number)


def both_ways(rig: Rig, number: int) -> None:
    """Blocks are saved, loaded and borrowed at the same time."""
    first, slots = rig.blocks(), rig.slots()
    contents = rig.work.contents(first)
    rig.until_over(rig.save(first, slots, rig.work.write(first, contents)))
    second, second_slots, third = rig.blocks(), rig.slots(), rig.blocks()
    second_contents, third_contents = rig.work.contents(second), rig.work.contents(third)
    keys = rig.lend(third_contents)
    loads = [rig.engine.load(slots, first), rig.engine.borrow(POOL, keys, third)]
    save = rig.engine.save(second, second_slots)
    rig.engine.step(
        rig.work.hold_up(_LONG_S),
        rig.work.write(second, second_contents),
        takes=[*first, *second, *third],
        messages=[save, *loads],
    )
    rig.compare(number, loads[0], contents)
    rig.compare(number, loads[1], third_contents)
    rig.until_over(save)
    rig.give_back(blocks=[*first, *third, *second], slots=slots)
    rig.restore(number, second_slots, second_contents)
    rig.give_back(slots=second_slots)


def lent(rig: Rig, number: int) -> None:
    """Blocks come from two memories of a pool, which gives some of their places to others meanwhile."""
    blocks = rig.blocks()
    contents, former, later = (rig.work.contents(blocks) for _ in range(3))
    keys = rig.lend(contents)
    rig.engine.step(rig.work.write(blocks, former), takes=blocks)
    rig.engine.step(rig.work.hold_up(_LONG_S), rig.work.check(number, blocks, former))
    load = rig.engine.borrow(POOL, keys, blocks)
    rig.engine.step(takes=blocks, messages=[load])
    for key in rig.numbers.sample(keys, min(4, len(keys))):
        rig.lend(rig.work.contents(blocks[:1]), instead_of=[key])
        rig.chip.pause()
    ok = rig.until_over(load)
    assert ok is not None
    absent = [index for index, good in enumerate(ok) if not good]
    rig.engine.step(rig.work.write([blocks[i] for i in absent], [later[i] for i in absent]))
    held = [mine if good else computed for mine, computed, good in zip(contents, later, ok, strict=True)]
    rig.engine.step(rig.work.check(number, blocks, held))
    rig.num_restored += sum(ok)
    rig.give_back(blocks=blocks)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a round does, and to which KV."""

    round: Round
    num_groups: int = 1
    in_one_part: bool = False
    """Whether a block is one range of bytes, with its layers one after the other, as in our own engine."""
    cost: float = 1.0
    """About how many times as long a round takes as one of the cheapest scenario, on a simulated device."""


SCENARIOS: Mapping[str, Scenario] = {
    "delay before store": Scenario(delayed_store),
    "delay before load": Scenario(delayed_load, cost=1.5),
    "load beside queued steps": Scenario(freed_late, cost=2.5),
    "layer by layer": Scenario(layer_by_layer, in_one_part=True, cost=6.0),
    "zeroing against loads": Scenario(zeroing, cost=2.0),
    "blocks reused while copies fly": Scenario(reuse, cost=7.0),
    "preemption": Scenario(preemption, cost=4.5),
    "cancel in the middle of a load": Scenario(cancelled, cost=3.0),
    "several engine streams": Scenario(several_streams, cost=15.0),
    "CUDA graphs": Scenario(graphs, cost=2.5),
    "loads and saves at a time": Scenario(both_ways, cost=6.0),
    "several KV groups": Scenario(several_groups, num_groups=2, cost=10.0),
    "loans whose places change hands": Scenario(lent, cost=4.0),
}
