"""Whether the account of energy can be trusted, on a node whose power is known and on a real GPU.

**Attribution**: attributed joules beside the true ones.

**Shapley**: three ways to share a node's energy beside the Shapley value.
"""
