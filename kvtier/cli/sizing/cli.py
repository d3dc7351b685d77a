"""The command `kvtier size`."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.options import Json, print_json, telling_in_json
from kvtier.cli.sizing.estimate import Demand, Estimate, Way, break_even_bytes_per_s, estimate, ways
from kvtier.cli.sizing.model_shape import ModelShape, load_model_shape
from kvtier.config.findings import size_words
from kvtier.errors import ConfigError


class KvDtype(StrEnum):
    """What the numbers of KV are kept in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


@telling_in_json
def size(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder, whose config.json is read, or GGUF file.")],
    conversations: Annotated[int, typer.Option(min=1, help="Conversations that are to be found again.")] = 1000,
    active: Annotated[
        int | None, typer.Option(min=1, help="Conversations that go on within minutes. Default: a tenth of them.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a conversation, answers included.")] = 4096,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts with a pool each, among which they are divided.")] = 1,
    kv_dtype: Annotated[KvDtype, typer.Option(help="What KV is kept in.")] = KvDtype.BFLOAT16,
    tokens_per_block: Annotated[int, typer.Option(min=1, help="As in [cache]; in vLLM, its --block-size.")] = 16,
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(min=1, help="How fast an engine computes a prompt: what fetching is compared with.")
    ] = None,
    json: Json = False,
) -> None:
    """How much memory and disk so many conversations take, and which links are worth it.

    Measure --prefill-tokens-per-s on your engine (`vllm bench serve`, or the log of a long prompt): with it, the
    bandwidth is told below which computing again is faster than fetching.

    Example: kvtier size models/Llama-3.1-8B --conversations 5000 --tokens 8000 --prefill-tokens-per-s 9000
    """
    shape = load_model_shape(model)
    if shape.kv_values_per_token == 0:
        raise ConfigError(f"{model}: no layer keeps KV of the whole prompt, so that it does not grow with tokens")
    token_bytes = shape.bytes_per_token(kv_dtype)
    in_memory = active if active is not None else max(1, conversations // 10)
    if in_memory > conversations:
        raise ConfigError(f"--active {in_memory}: more than --conversations {conversations}; lower it")
    window_bytes = shape.window_bytes(kv_dtype, tokens)
    demand = Demand(token_bytes, tokens_per_block, tokens, conversations, in_memory, window_bytes)
    found = estimate(demand)
    links = ways(found.conversation_bytes, tokens, prefill_tokens_per_s)
    break_even = None if prefill_tokens_per_s is None else break_even_bytes_per_s(token_bytes, prefill_tokens_per_s)
    if json:
        print_json(
            {
                "model": shape.name,
                "windowed_layers": shape.num_windowed_layers,
                **asdict(demand),
                **asdict(found),
                "hosts": hosts,
                "break_even_bytes_per_s": break_even,
                "ways": [asdict(way) for way in links],
            }
        )
        return
    _print(shape, demand, found, hosts)
    if break_even is not None:
        print(f"fetching beats computing above {size_words(break_even)}/s ({break_even * 8 / 1e9:,.1f} Gbit/s)")
    print()
    print(f"{'over':24} {'usable':>11}   {'a conversation takes':>20}" + ("" if break_even is None else "   gain"))
    for way in links:
        print(_way_line(way))


def _print(shape: ModelShape, demand: Demand, found: Estimate, hosts: int) -> None:
    print(f"{shape.name}: {size_words(demand.bytes_per_token)} of KV a token")
    print(f"a block of {demand.tokens_per_block} tokens: {size_words(found.block_bytes)}")
    print(f"a conversation of {demand.conversation_tokens:,} tokens: {size_words(found.conversation_bytes)}")
    if demand.window_bytes:
        print(f"of that {size_words(demand.window_bytes)} in layers that see {shape.window_tokens:,} tokens only")
    elif shape.num_windowed_layers:
        print(f"{shape.num_windowed_layers} layers keep a window or a state of one size each: not counted")
    each = f" on each of {hosts} hosts" if hosts > 1 else ""
    in_memory = size_words(found.memory_bytes / hosts)
    print(f"memory for {demand.active_conversations:,} active conversations: {in_memory}{each}")
    print(f"disk for all {demand.conversations:,}: {size_words(found.disk_bytes / hosts)}{each}")


def _way_line(way: Way) -> str:
    gain = "" if way.gain is None else f"   {way.gain:,.1f}x"
    return f"{way.name:24} {size_words(way.bytes_per_s):>9}/s   {way.fetch_s * 1000:17,.1f} ms{gain}"
