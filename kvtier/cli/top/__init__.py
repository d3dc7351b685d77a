"""`kvtier top`: what engines and pools do at this moment, again and again."""
