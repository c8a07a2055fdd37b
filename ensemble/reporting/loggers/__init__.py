"""The observers of a run: TensorBoard, MLflow, Weights & Biases, webhooks and the mirror.

One process, not the controller's, has them all, a thread for each (`observer_main`); the controller starts and
ends it (`observers`). What a logger writes is computed from the event log alone (`points`, `follower`).
"""
