"""What tiers have in common: metrics, circuit breaker, deadlines, events, tenants."""
