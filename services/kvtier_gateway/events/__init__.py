"""KV events of engines: what each holds on its device and in its host memory."""
