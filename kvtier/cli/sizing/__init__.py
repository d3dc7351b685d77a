"""How much KV a model makes, and what it takes to keep it."""
