"""`ensemble bench compression`: what low-precision gradient exchange saves and costs, after Grubic et al. 2018."""
