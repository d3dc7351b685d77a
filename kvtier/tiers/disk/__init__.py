"""The disk tier: a log of segments on a local file system."""
