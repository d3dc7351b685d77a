"""The engines behind the gateway: which there are, whether they live, and what they have to do."""
