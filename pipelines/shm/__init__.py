"""The memory that processes share: ring buffers, private mappings, and how much memory there is."""
