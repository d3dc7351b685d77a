"""A small real engine, OpenAI-compatible, that shows the whole path and is the test bed of the cache."""
