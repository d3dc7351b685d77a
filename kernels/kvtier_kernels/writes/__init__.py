"""New keys and values into paged KV."""
