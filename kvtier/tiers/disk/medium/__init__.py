"""The file system below a disk tier: files, its folder, and what goes wrong with them."""
