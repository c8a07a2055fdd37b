"""The Ray executor, in the only package that imports Ray.

On every node a **node agent** (an actor) keeps the feeders and measures the node. Every rank of a member is an
actor of its own, on the node and device that the controller chose.
"""

from ensemble.executors.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
