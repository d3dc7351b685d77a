"""Prompts to tokens, as an engine makes them of requests."""
