"""Hyperparameter search: proposals, pruning, and the Optuna study. The only importer of Optuna."""
