"""An LSTM in fp16 on a CPU, for which oneDNN has no kernel.

With oneDNN on, torch takes its LSTM for fp16 too, and oneDNN answers "could not create a primitive descriptor for
the LSTM forward propagation primitive". torch's own kernel can do it: matrix products in fp16, the cell in fp32.
It is slow (fp16 on a CPU is for looking at its numerics) and right. GRU and RNN have only that kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def lstm_without_onednn(model: nn.Module) -> None:
    """Let the model's LSTMs leave oneDNN out; its other layers are computed as before."""
    for module in model.modules():
        if isinstance(module, nn.LSTM):
            switch = _Switch()
            module.register_forward_pre_hook(switch.before)
            module.register_forward_hook(switch.after, always_call=True)


class _Switch:
    """oneDNN off for the length of a call; the flag is the process's."""

    def __init__(self) -> None:
        self._was = True

    def before(self, module: nn.Module, args: Any) -> None:
        self._was = bool(torch.backends.mkldnn.enabled)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        torch.backends.mkldnn.enabled = self._was  # type: ignore[assignment]
