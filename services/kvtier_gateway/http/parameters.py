"""Which parameters of a request go on to engines, which are the gateway's own, and which are refused."""

SHARED = frozenset(
    # OpenAI's of both routes.
    "model max_tokens temperature top_p seed stop stream stream_options user metadata store safety_identifier "
    "prompt_cache_key prompt_cache_retention service_tier n frequency_penalty presence_penalty logit_bias logprobs "
    # What vLLM, SGLang and kvtier's engine have beyond them, about sampling and about the form of an answer.
    "use_beam_search length_penalty early_stopping repetition_penalty return_prompt_token_ids return_token_ids top_k "
    "min_p min_tokens stop_token_ids ignore_eos include_stop_str_in_output skip_special_tokens "
    "spaces_between_special_tokens allowed_token_ids bad_words return_tokens_as_token_ids add_special_tokens "
    "prompt_logprobs thinking_token_budget response_format structured_outputs echo regex ebnf json_schema "
    "no_stop_trim".split()
)
CHAT = SHARED | frozenset(
    "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls functions function_call "
    "modalities audio prediction reasoning_effort verbosity web_search_options include_reasoning separate_reasoning "
    "stream_reasoning chat_template_kwargs add_generation_prompt continue_final_message".split()
)
COMPLETIONS = SHARED | frozenset("prompt best_of suffix".split())
OWN = frozenset(
    # Whose cache it is.
    "kv_transfer_params cache_salt extra_key kv_hints "
    # Which server computes, or sends the KV, for whom, and before whom.
    "bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank data_parallel_rank routed_dp_rank priority "
    "rid request_id session_params session_id vllm_xargs routing_key "
    # Files, code and tensors.
    "lora_path custom_logit_processor chat_template prompt_embeds input_embeds return_hidden_states "
    "mm_processor_kwargs media_io_kwargs extra_body custom_params".split()
)
"""What clients may not set: it is taken out of their requests."""
TEXT_PARTS = ("text", "refusal")
"""The kinds of parts of messages that hold nothing but text. Not a set: a client may send a list where a kind belongs,
which has no hash."""
