"""KV events and statistics."""
