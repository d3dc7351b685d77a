"""`kvtier config`: what the configuration may have, what it comes to, and what is wrong with it."""
