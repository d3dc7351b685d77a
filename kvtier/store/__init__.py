"""Memory above lower tiers as one cache: write policies, reads from below, retention, events."""
