"""Multi-tier KV cache offload for LLM inference. `docs/structure.md` maps the modules."""
