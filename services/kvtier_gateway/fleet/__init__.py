"""A simulator of engines behind the gateway: discrete events, and the gateway's own strategies."""
