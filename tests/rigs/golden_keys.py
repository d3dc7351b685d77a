"""What the golden vectors of keys are made of, in the tests of keys and in docs/stored-form.md."""

import numpy as np

from kvtier.identity.keys import Extra, PrefixHasher
from kvtier.identity.namespace import Namespace

SECRET = bytes(range(32))
HASHER = PrefixHasher(SECRET, "red", 4)
CHAIN = HASHER.hash_blocks(np.arange(1, 13, dtype=np.int32), extras={1: [Extra("lora", b"adapter-7", 0)]})
NAMESPACE = Namespace(
    weights_digest=SECRET,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    physical_layout="L2NHD",
    backend="torch-cpu",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
)
