"""The private API of torch in `ensemble/comm/_compat.py`.

That the operations on lists of tensors are those on each, also on a GPU, is shown by the tests of LARS.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from ensemble.comm import _compat
from ensemble.comm.torch_dist import connect

LOOK = "look at {} in ensemble/comm/_compat.py"


def test_all_process_groups_are_given_up_and_others_may_be_made_by_no_public_name_yet(tmp_path: Path) -> None:
    for name in ("first", "second"):
        connect((tmp_path / name).as_uri(), rank=0, world=1, device=torch.device("cpu"), interface="lo")
        dist.new_group([0])
        _compat.abort_process_groups()
        assert not dist.is_initialized(), LOOK.format("abort_process_groups")
    assert not hasattr(dist, "abort_process_group"), "needed no longer? " + LOOK.format("abort_process_groups")
    assert not hasattr(torch, "foreach_add"), "needed no longer? " + LOOK.format("each_plus and its like")


def test_writes_to_a_tensor_are_counted() -> None:
    tensor = torch.zeros(3)
    before = _compat.count_writes(tensor)
    tensor.view(3)[0] = 1
    assert _compat.count_writes(tensor) > before, LOOK.format("count_writes")
