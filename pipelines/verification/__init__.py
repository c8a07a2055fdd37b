"""Compares what a reader is served with what its own pipeline prepares (docs/decisions/0042)."""
