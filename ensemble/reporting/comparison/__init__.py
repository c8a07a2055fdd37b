"""Compares runs: how they were declared, what they reached, what they cost; for the command and for the page."""
