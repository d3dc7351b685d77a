"""vLLM's KV: groups, pages, device blocks, copies."""
