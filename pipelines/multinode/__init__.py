"""TODO: what this folder is for."""
