"""The gateway in front of engines: it chooses the engine of every request."""
