"""From prompts to the keys of their blocks, and to what the pool has of them."""
