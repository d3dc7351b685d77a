"""What the scheduler side knows of requests: keys, lookups, loads, saves, pins, tenants."""
