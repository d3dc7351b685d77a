"""`kvtier demo`: the whole path on a real model, in processes of their own."""
