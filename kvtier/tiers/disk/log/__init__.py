"""The log under the disk tier: segments, an index of what is in them, and what keeps both true to each other.

writing, finding, forgetting   verbs of the tier: append, look up and read, write tombstones
appending, room, moving        the end of the log; segments that go to make room for it, and what is kept of them
segment_files, reading         files of segments: extents, footers, syncs; blocks in them
lanes                          the threads that do both with large batches
recovery, scan                 what a start finds; fsck asks the same
books                          what the tier's lock guards: index, segments, writes under way
format, folder                 how it looks on disk (docs/disk-format.md)
"""
