"""Replays a trace through the policies that caches use, to see how often which cache would have had the blocks."""
