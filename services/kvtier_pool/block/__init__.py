"""The block protocol: listening, sessions, verbs, shared memory."""
