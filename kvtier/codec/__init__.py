"""The stored form of a block, and the lossless codecs that it may be packed with."""
