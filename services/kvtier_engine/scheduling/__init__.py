"""Which request computes when: requests, scheduler, prefix cache, sampling."""
