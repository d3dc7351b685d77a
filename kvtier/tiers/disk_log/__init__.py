"""The log under the disk tier: segments, an index of what is in them, and what keeps both true to each other.

writing, reading, forgetting   verbs of the tier: append, look up and read, write tombstones
appending, room                the end of the log; segments that go to make room for it
segment_files                  files of segments: extents, footers, syncs
recovery, scan                 what a start finds; fsck asks the same
books                          what the tier's lock guards: index, segments, writes under way
format, folder                 how it looks on disk (docs/disk-format.md)
"""
