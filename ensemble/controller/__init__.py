"""The loop of a run: events of members come in, decisions go out to an executor."""
