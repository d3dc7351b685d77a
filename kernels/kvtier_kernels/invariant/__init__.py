"""What a model computes beside attention, with bits of a token that depend on no other token."""
