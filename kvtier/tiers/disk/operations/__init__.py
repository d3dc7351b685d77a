"""The disk tier's verbs: append, look up and read, write tombstones; what a start finds; surveys for operators."""
