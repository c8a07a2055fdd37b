"""Samples kept after their deterministic stages, in memory or on disk."""
