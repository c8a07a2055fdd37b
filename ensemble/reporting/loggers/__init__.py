"""Logs a run to TensorBoard, MLflow and Weights & Biases, from its event log.

Each logger is a process of its own, which follows the log from an offset (`process_main`), so that a server that
does not answer never holds the run up, and what a library writes to its environment is not the user's. What is
logged is computed from the events alone (`points`); a file for each library writes it. What a logger has written
is in `loggers/NAME.json` in the run directory, replaced atomically: a resume goes on from there, also after all
processes were killed.
"""
