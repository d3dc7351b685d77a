"""Who computes when: requests, scheduler, prefix cache, sampling."""
