"""What KV is of: weights, adapters, media."""
