"""Measures, when a member starts, how its gradients are best exchanged, and decides."""
