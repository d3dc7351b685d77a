"""Wire formats: the block protocol (`docs/block-protocol.md`) with its addresses and sockets; the pool's gRPC API
(`pool.proto`), its frames by hand, its status codes; what both say of pins.

`pool_pb2.py` and `pool_pb2.pyi` are generated and committed. protoc stamps its own version into them and
an older protobuf runtime refuses the module, so they are made with the oldest release that the package
allows beside it: `make proto`.

`tests/protocol/test_frames.py` compares the committed module with the proto, and its stamp with pyproject.toml.
"""
