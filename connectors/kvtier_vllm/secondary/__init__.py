"""What a secondary tier of vLLM's native offloading is made of: identity, lookups, transfers, counters."""
