"""Prompts to tokens, as an engine makes them of requests."""

import os

# The library reads it when it encodes texts. Callers tokenise prompts in threads of their own: the library's would only
# come on top, one for each core, and a process that is forked off would not have them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
