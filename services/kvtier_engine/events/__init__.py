"""KV events: what routers are told of the blocks that this engine has."""
