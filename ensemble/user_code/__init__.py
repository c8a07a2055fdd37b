"""The user's code that members train with: found, fingerprinted, and told from installed libraries."""
