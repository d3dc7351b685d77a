"""Answers to batches that a mover must not carry out, because they are of weights that its worker has no longer."""

from dataclasses import replace

from kvtier.offload.messages import Copied, LoadBatch, Loaded, SaveBatch, Stored, ToDirectory, ToMover


def refusal(message: ToMover) -> list[ToDirectory] | None:
    """Answers to a batch that would touch the device, which say that none of its blocks was copied. None: it does not.

    What is in the arena and below stays what its keys say, whatever the weights are.
    """
    if isinstance(message, SaveBatch):
        return [Copied(message.batch_id, bytes(len(message.keys))), Stored(message.batch_id)]
    if isinstance(message, LoadBatch):
        return [Loaded(message.batch_id, bytes(len(message.keys)), 0.0)]
    return None


def without_blocks(loaded: Loaded) -> Loaded:
    """The answer that `loaded` would be if its load had brought nothing."""
    return replace(loaded, ok=bytes(len(loaded.ok)))
