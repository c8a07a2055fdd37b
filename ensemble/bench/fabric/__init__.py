"""`ensemble bench fabric`: what a network does for collectives and for training, after Samsi et al. 2020.

Collectives are shown as nccl-tests shows them: *algbw*, the algorithm's bandwidth, is a message's size by the
time; *busbw*, the bus's, multiplies it by what the best algorithm must send of it, so that it can be set against
the rate of a link whatever the number of ranks. Beside each time stands the one that was predicted (`predict`).
"""
