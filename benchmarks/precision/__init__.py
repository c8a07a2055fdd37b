"""`python -m benchmarks precision`: what half precision costs and saves, after Svyatkovskiy et al. 2019.

Speed: training steps of each precision in turn in one process, on the same batches, with the code that trains
members. Memory and exchanged bytes: a process for each precision. Accuracy: an Ensemble whose members are
precisions x seeds, on one shared pipeline.
"""
