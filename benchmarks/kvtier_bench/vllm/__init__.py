"""`kvtier bench vllm`: time to first token and throughput of real vLLM engines, with each way to keep KV.

Apart from `kvtier_vllm`, which cannot be imported without vLLM: the command line has to list this one without it.
"""
