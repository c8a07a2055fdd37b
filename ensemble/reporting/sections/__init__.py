"""The sections of a run's report and of its status, each a pure function of the run's state."""
