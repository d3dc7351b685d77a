"""Makes live objects from a configuration: the only place of the core that does."""
