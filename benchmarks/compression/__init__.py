"""What low-precision gradient exchange saves and costs, after Grubic et al. 2018."""
