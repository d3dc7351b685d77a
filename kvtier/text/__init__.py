"""Prompts to tokens, as an engine makes them of requests."""

import os

# Read when texts are encoded. Who tokenises prompts does so in threads of its own: those of tokenizers would only come
# on top, one for each core, and a process that is forked off would not have them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
