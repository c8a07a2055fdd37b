"""A hyperparameter search: what is proposed, what is pruned, and its study. The only importer of Optuna."""
