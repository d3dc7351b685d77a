"""The tables `[engine]` and `[engine.adapters.NAME]`, of `kvtier engine` alone."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, model_validator

from kvtier.config.fields import Bytes, Count, Section


class AdapterConfig(Section):
    """A LoRA adapter of `kvtier engine`."""

    path: Path
    """The folder that PEFT has saved. Blocks are known by what is in it, whatever the adapter is called, which is what
    requests give as `model`. Each adapter takes memory for the weights that it changes, and the sequences of a step are
    computed adapter by adapter: many in one step cost time."""


class EngineConfig(Section):
    """The engine of `kvtier engine serve`."""

    model: Path | None = None
    """Hugging Face folder with safetensors, or a GGUF file."""
    model_cache_dir: Path | None = None
    """The folder in which a GGUF is dequantised, once. Default: `~/.cache/kvtier/models`."""
    listen: str = "127.0.0.1:8000"
    """`host:port` of the OpenAI API; port 0 takes a free one."""
    allowed_hosts: list[str] = Field(default=[])
    """The names without a port by which clients call an engine that listens on a loopback address, and the hosts of
    web pages that may use it, beside `localhost` and loopback addresses: those of a proxy on this machine that hands on
    the `Host` it was asked for. A client that calls it by another name is refused, so that no web page reaches it."""
    tls_certificate: Path | None = None
    """Certificate chain, in PEM, of `listen`. Without, API keys, prompts and answers travel in the clear. Renewed files
    count from the next connection on."""
    tls_key: Path | None = None
    """The private key of `tls_certificate`, in PEM and not encrypted."""
    adapters: dict[str, AdapterConfig] = Field(default={})
    """LoRA adapters, each a table by the name that requests give as `model`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device that holds the model and its KV. `auto` takes the first CUDA device where torch and triton can use
    one. Engines on CPU and on CUDA do not share: their KV differs in the last bits."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Computation and KV. float32 takes twice the memory and flips no near ties."""
    batch_invariant: bool | None = None
    """Whether an answer is the same, bit for bit, whatever is found in the cache, in whichever chunks a prompt is
    computed, and whatever is computed beside it. Left out: true in bfloat16 on the CPU, where it costs up to 12 % of
    the speed, and false otherwise. True: in float32 on the CPU, too, where decodes take several times as long; and on
    CUDA, by kernels that are slower than those of libraries: on an H200, a prefill takes 1.15 times as long, and a
    decode step 1.4 to 1.9 times. Refused with `lossy_codec`, and for Gemma 2 on the CPU, where it is false.
    Engines for which it is true share only with those whose arithmetic gives the same bits."""
    lossy_codec: Literal["none", "int8_per_head", "fp8_e4m3_per_head"] = "none"
    """The form in which blocks leave the device: half as many bytes in host memory, on disk and in the pool, and half
    as many to move. Needs bfloat16. What comes back is rounded, so answers are not quite those of an engine without a
    cache; int8 changes them the least. Engines with different codecs do not share."""
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of a forward pass; 0 takes one per core."""
    kv_bytes: Bytes = ByteSize(2**30)
    """Device memory for paged KV. Too small: prefixes are evicted before they are hit, requests wait."""
    max_batch_tokens: Count = 4096
    """Tokens per step. Small: prefill in many chunks. Large: decoding requests wait longer for a prefill."""
    max_running: Count = 16
    """Requests in one batch. One that asks for several answers (`n`, `best_of`) counts as so many, and may ask for no
    more than this."""
    order: Literal["cache_aware", "fcfs"] = "cache_aware"
    """Which waiting request begins next. `cache_aware`: the one with the longest cached prefix, where each cached token
    counts as much as waiting for the time that computing one takes; and a request waits for blocks that another one is
    just computing, so that equal prompts and prefixes that arrive together are computed once. `fcfs`: the first one
    that came; what arrives together is computed for each."""
    partial_reuse: bool = True
    """Whether the leading tokens of a block are reused where a prompt differs from it only later: up to
    `cache.tokens_per_block` - 1 tokens more of each hit. Pays with large blocks and with prompts that differ at their
    ends, such as questions on one document. Costs about 500 bytes and 2 us for each block that becomes full, and the
    copy of a part of a block for each request that gains by it."""
    layerwise_loads: bool = True
    """Whether, on CUDA, a request that is alone, and whose prefix is in host memory, begins to compute when the first
    layer of that prefix has been copied to the device, instead of all of it. Saves most of the shorter of copying and
    computing: a quarter of both together with 16,384 cached tokens of an 8B model on an H200. Without effect on the
    CPU, with `lossy_codec` or `cache.verify_loads = "device"`, for models with sliding windows (Gemma), and where a
    layer of a block is smaller than 32 KiB.
    False: requests wait until all has been copied."""
    cuda_graphs: bool = True
    """Whether, on CUDA, steps in which every request has one new token are replayed from graphs, captured at the start
    for 1, 2, 4 ... `max_running` requests. The log names the time that takes, and the device memory beside `kv_bytes`.
    False spares both and launches every operation by itself, for which the device then has to wait; so it is for
    models with sliding windows (Gemma)."""
    cache: bool = True
    """False computes every prompt from scratch: no device hits, no tiers."""

    @property
    def may_be_invariant(self) -> bool:
        """Whether, on the CPU, `batch_invariant` is true where it is left out."""
        return self.dtype == "bfloat16" and self.lossy_codec == "none"

    @model_validator(mode="after")
    def _invariant_means_lossless(self) -> Self:
        if self.batch_invariant and self.lossy_codec != "none":
            raise ValueError(
                f'batch_invariant is true, but lossy_codec = "{self.lossy_codec}" rounds what comes back from the '
                'cache; set lossy_codec to "none", or leave batch_invariant out'
            )
        return self
