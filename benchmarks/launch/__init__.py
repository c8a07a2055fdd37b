"""Starts a function on several ranks: on this machine, on emulated hosts, under MPI."""
