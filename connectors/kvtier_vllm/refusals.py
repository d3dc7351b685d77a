"""Answers to batches that a mover must not carry out, because they are of weights that its worker has no longer."""

from dataclasses import replace

from kvtier.hierarchy.messages import Copied, LoadBatch, Loaded, SaveBatch, Stored, ToDirectory, ToMover, encode


def refusal(message: ToMover) -> list[bytes] | None:
    """Answers to a batch that would touch the device, which say that none of its blocks was copied. None: it does not.

    What is in the arena and below stays what its keys say, whatever the weights are.
    """
    answers: list[ToDirectory]
    if isinstance(message, SaveBatch):
        answers = [Copied(message.batch_id, bytes(len(message.keys))), Stored(message.batch_id)]
    elif isinstance(message, LoadBatch):
        answers = [Loaded(message.batch_id, bytes(len(message.keys)), 0.0)]
    else:
        return None
    return [encode(answer) for answer in answers]


def without_blocks(loaded: Loaded) -> Loaded:
    """The answer that `loaded` would be if its load had brought nothing."""
    return replace(loaded, ok=bytes(len(loaded.ok)))
