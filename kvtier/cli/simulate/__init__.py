"""`kvtier simulate`: what another policy, or more memory, would have given."""
