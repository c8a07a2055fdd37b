"""`ensemble bench precision`: what half precision costs and saves, after Svyatkovskiy et al. 2019.

Speed: training steps of each precision in turn in one process, on the same batches, through the very code that
members are trained by. Memory and exchanged bytes: a process for each. The metric: an Ensemble whose members are
precisions x seeds, on one shared pipeline.
"""
