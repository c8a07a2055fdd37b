"""What papers found about low precision, each figure with its paper."""

from __future__ import annotations

PAPER = "Grubic et al. 2018"
#: Its speed-ups on 8 accelerators by reduce-and-broadcast over MPI, without NCCL.
SPEEDUPS = (1.1, 2.05)
QSGD_PAPER = "Alistarh et al. 2017 (QSGD)"
#: Its accuracies in percent: fp32, and with as many bits.
ACCURACIES = {
    "AlexNet": (59.50, 60.05, 4),
    "ResNet-50": (74.68, 74.76, 4),
    "ResNet-110 on CIFAR-10": (93.86, 94.19, 4),
    "ResNet-152": (77.00, 76.74, 8),
    "LSTM on AN4": (81.13, 81.15, 4),
}
#: Schemes whose published accuracy is that of fp32 (QSGD of 8 and 4 bits, 1-bit SGD with error feedback): QSGD of
#: 2 bits lost 1.73 points, and PowerSGD is younger.
LOSSLESS = ("fp16", "qsgd16", "qsgd8", "qsgd4", "onebit+ef", "onebit-zero+ef", "onebit-tensor+ef")
