"""`python -m benchmarks scaling`: more workers, and larger batches.

**Workers** (Svyatkovskiy et al. 2019): one member data-parallel over 1 to k workers, its step split into computing
and synchronization, beside the model t = compute / n + communication(n).

**Batches** (Jia et al. 2018): the batch grows with the number of epochs fixed; SGD against LARS without and with
weight decay on biases and normalization, each with the best learning rate of a grid.
"""
