"""Steps of vLLM's scheduler: what they compute, when they start, how long they take."""
