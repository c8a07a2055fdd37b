"""Prepares samples: reads a record and applies the stages."""
