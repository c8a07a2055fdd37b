"""The Ray executor: the only room that imports Ray.

On every node a **node agent** (an actor) keeps the feeders and meters the node; every rank of a member is an
actor of its own, placed by the controller's decision, on the device that was chosen for it.
"""

from ensemble.executors.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
