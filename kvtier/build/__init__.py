"""From a configuration to live objects: the only place of the core that makes them."""
