"""The frozen network that all members of a run share (`Recipe.base`).

`making` makes it once a run, in a process of its own; `frozen` opens its file, whose pages all processes of a node
share; `prefix` computes it once for all members of a combined model.
"""
