"""What requests to `/v1/completions` and `/v1/chat/completions` may say.

Parameters that this engine does not honour are refused unless they ask for nothing, so that an answer is never
silently of another kind than what was asked for. `null` is the same as leaving a parameter out. Beyond OpenAI's,
requests may say `return_prompt_token_ids`, and `kv_transfer_params` as those to vLLM with kvtier.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kvtier.text.tool_calls import CallStyle
from kvtier_engine.api.conversation import Messages, NamedTool, Only, Tool, ToolChoice, Tools, conflict_of_tools
from kvtier_engine.text.answer_grammar import ANY_OBJECT, HeldCalls, grammar_of_answers

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of `/v1/completions`."""
_MOST_STOP_SEQUENCES = 4
_LONGEST_STOP_SEQUENCE = 1024
"""Characters. What is held back while it may be the beginning of a stop sequence is no longer."""

MOST_PROMPTS = 128
"""Prompts of one request."""
_MOST_ANSWERS = 128
"""OpenAI's limit of `n`, as those below; here also of the answers that are computed for all prompts of a request."""
_MOST_BIASES = 300
_MOST_TOP_OF_COMPLETIONS = 5
_MOST_TOP_OF_CHATS = 20

TokenLimit = Annotated[int, Field(ge=1)]
# Only the first error is told: without `fail_fast`, a long list of wrong items costs seconds of the event loop.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
NumAnswers = Annotated[int, Field(ge=1, le=_MOST_ANSWERS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
LogitBias = Annotated[
    dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]], Field(max_length=_MOST_BIASES)
]
StopSequence = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP_SEQUENCE)]
StopSequences = Annotated[list[StopSequence], Field(max_length=_MOST_STOP_SEQUENCES)]


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    """One more chunk before the end, with the usage and no choice."""
    include_obfuscation: bool | None = None
    """Accepted and ignored: chunks are never padded."""


class JsonSchema(BaseModel):
    """What an answer has to be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None
    """Accepted and ignored, as the next two: an answer fits its schema in any case."""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """`response_format` of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def schema_of_answers(self) -> Mapping[str, Any] | None:
        """None: any text."""
        if self.type == "json_object":
            return ANY_OBJECT
        return None if self.json_schema is None or self.type == "text" else self.json_schema.json_schema


class KvtierParams(BaseModel):
    """What a gateway, or a client, says of a request's cache. vLLM's connector knows the same."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tenant: str | None = None
    """The tenant that the request is of: one of those that this engine serves."""
    no_store: Annotated[Any, AfterValidator(Only(False))] = None
    pin: Annotated[Any, AfterValidator(Only(False))] = None
    ttl_s: Annotated[Any, AfterValidator(Only())] = None


class KvTransferParams(BaseModel):
    """`kv_transfer_params`, of which kvtier's table counts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kvtier: KvtierParams | None = None


class SamplingBody(BaseModel):
    """What both kinds of requests share."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: TokenLimit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Seed | None = None
    stop: StopSequence | StopSequences | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_prompt_token_ids: bool | None = None
    kv_transfer_params: KvTransferParams | None = None

    user: Any = None
    """Accepted and ignored, as all of this block."""
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    service_tier: Any = None

    n: NumAnswers | None = None
    use_beam_search: bool | None = None
    """The likeliest answers instead of drawn ones, as vLLM calls it, with the next two. `num_branches` is the width."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    """vLLM's."""
    logit_bias: LogitBias | None = None

    @property
    def tenant(self) -> str | None:
        """The tenant that the request names."""
        kvtier = None if self.kv_transfer_params is None else self.kv_transfer_params.kvtier
        return None if kvtier is None else kvtier.tenant

    @property
    def stop_sequences(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_branches(self) -> int:
        """How many answers are computed."""
        return self.num_choices

    @property
    def num_top(self) -> int | None:
        """How many of the likeliest tokens come with each token; None: no log probabilities at all."""
        return None

    def conflict(self) -> tuple[str, str] | None:
        """The parameter that does not go with another one, and why; None: all do."""
        if self.stream_options is not None and not self.stream:
            return "stream_options", "only with stream = true"
        return self._conflict_of_beams()

    def _conflict_of_beams(self) -> tuple[str, str] | None:
        if not self.use_beam_search:
            settings = {"length_penalty": self.length_penalty, "early_stopping": self.early_stopping}
            name = next((name for name, value in settings.items() if value is not None), None)
            return None if name is None else (name, "only with use_beam_search = true")
        if self.num_branches < 2:
            return "n", "is the width of a beam search, which must be at least 2"
        drawing: dict[str, object] = {
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p not in (None, 1),
        }
        drawing |= {"logprobs": self.num_top is not None, "logit_bias": self.logit_bias}
        drawing |= {"frequency_penalty": self.frequency_penalty, "presence_penalty": self.presence_penalty}
        drawing |= {"repetition_penalty": self.repetition_penalty not in (None, 1)}
        name = next((name for name, value in drawing.items() if value), None)
        return None if name is None else (name, "not with use_beam_search; leave it out")

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: str | TokenIds | Texts | TokenIdLists
    """Text, or token ids; or several of them, each of which is answered."""

    best_of: NumAnswers | None = None
    """How many answers are computed, of which the `n` likeliest per token are told."""
    echo: Annotated[Any, AfterValidator(Only(False))] = None
    logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP_OF_COMPLETIONS)] | None = None
    """How many of the likeliest tokens are told with each token."""
    suffix: Annotated[Any, AfterValidator(Only(""))] = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """All of them."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [each for each in self.prompt if not isinstance(each, int)]
        return several or [[each for each in self.prompt if isinstance(each, int)]]

    @property
    def num_branches(self) -> int:
        return self.best_of or self.num_choices

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    def conflict(self) -> tuple[str, str] | None:
        if self.num_branches < self.num_choices:
            return "best_of", "must be at least n, since the n answers are chosen from so many"
        if self.num_branches > self.num_choices and self.stream:
            return "best_of", "which answers are best is known at the end: leave out stream"
        num_answers = len(self.prompts) * self.num_branches
        if num_answers > _MOST_ANSWERS:
            return "prompt", (
                f"{len(self.prompts)} prompts with {self.num_branches} answers each are {num_answers} answers, but one "
                f"request may have {_MOST_ANSWERS}; send several requests"
            )
        return SamplingBody.conflict(self)


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: TokenLimit | None = None
    """OpenAI's newer name of `max_tokens`; counts when both are given."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MOST_TOP_OF_CHATS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    """Left out: `auto`, or `none` where there are no tools."""
    parallel_tool_calls: bool | None = None
    """False: an answer has one call at the most."""
    functions: Annotated[Any, AfterValidator(Only([]))] = None
    function_call: Annotated[Any, AfterValidator(Only("none", "auto"))] = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[Any, AfterValidator(Only(["text"]))] = None
    audio: Annotated[Any, AfterValidator(Only())] = None
    prediction: Annotated[Any, AfterValidator(Only())] = None
    reasoning_effort: Annotated[Any, AfterValidator(Only("none"))] = None
    verbosity: Annotated[Any, AfterValidator(Only())] = None
    web_search_options: Annotated[Any, AfterValidator(Only())] = None

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[Tool]:
        """What the model is told of: with `none`, nothing."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def most_calls(self) -> int | None:
        """How many an answer may have; None: no bound."""
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool) else None

    def grammar(self, style: CallStyle | None) -> str | None:
        """The grammar of answers; None: they are any text, and whatever calls the model makes of it.

        :param style: of calls; None: there are none.
        """
        schema = None if self.response_format is None else self.response_format.schema_of_answers
        calls = None if style is None else self._held_calls(style, schema)
        return None if schema is None and calls is None else grammar_of_answers(schema, calls)

    def _held_calls(self, style: CallStyle, schema: Mapping[str, Any] | None) -> HeldCalls | None:
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        tools = [tool for tool in self.offered_tools if named in (None, tool.function.name)]
        is_required = named is not None or self.tool_choice == "required"
        if not tools or not (is_required or schema is not None or any(tool.function.strict for tool in tools)):
            return None
        parameters = {tool.function.name: tool.schema_of_arguments for tool in tools}
        parallel = self.most_calls is None
        return HeldCalls(style=style, parameters=parameters, required=is_required, parallel=parallel)

    def conflict(self) -> tuple[str, str] | None:
        if self.top_logprobs is not None and self.top_logprobs > 0 and not self.logprobs:
            return "top_logprobs", "only with logprobs = true"
        answers = self.response_format
        if answers is not None and (answers.type == "json_schema") != (answers.json_schema is not None):
            return "response_format.json_schema", 'needed with type "json_schema", and only then'
        if self.use_beam_search and answers is not None and answers.type != "text":
            return "response_format", "not with use_beam_search; leave it out"
        if self.use_beam_search and self.offered_tools:
            return "tools", "not with use_beam_search; leave them out"
        conflict = conflict_of_tools(self.tools or [], self.tool_choice)
        if conflict is not None:
            return conflict
        return SamplingBody.conflict(self)


class ResetBody(BaseModel):
    """`POST /v1/cache/reset`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    scope: Annotated[Any, AfterValidator(Only("engine"))] = None
    """What forgets: this engine's device and its own tiers. The cache pool is not an engine's to empty."""
