"""A record of a source becomes a prepared sample."""
