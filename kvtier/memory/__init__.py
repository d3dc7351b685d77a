"""Host memory: pages, shared memory, arenas and slabs, and copies that let other threads run."""
