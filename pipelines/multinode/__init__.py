"""Feeders of several nodes share one stream: who prepares what, how they meet, how samples travel."""
