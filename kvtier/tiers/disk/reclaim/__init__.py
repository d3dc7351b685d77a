"""How a disk tier gets space back: eviction of segments, compaction, tombstones, files used again."""
