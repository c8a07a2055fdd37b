"""Preparation workers: processes that prepare samples into shared memory, and the pool that runs them."""
