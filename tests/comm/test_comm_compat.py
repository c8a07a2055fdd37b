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


def test_lists_of_tensors_are_changed_as_each_is() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 2, 2), ()]
    ours, others = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    pairs = list(zip(ours, others, strict=True))

    def same(got: object, wanted: list[torch.Tensor]) -> bool:
        return isinstance(got, list | tuple) and all(map(torch.equal, got, wanted))

    norms = _compat.foreach_norms(ours)
    torch.testing.assert_close(norms, torch.stack([tensor.norm() for tensor in ours]))
    assert same(_compat.foreach_add(ours, others, 0.5), [a.add(b, alpha=0.5) for a, b in pairs])
    assert same(_compat.foreach_multiply(ours, 3.0), [a * 3.0 for a in ours])
    assert same(
        _compat.foreach_multiply(ours, list(norms.unbind())), [a * n for a, n in zip(ours, norms, strict=True)]
    )

    kept, wanted = [a.clone() for a in ours], [a * 0.5 + b - 2 * b for a, b in pairs]
    _compat.foreach_multiply_(kept, 0.5)
    _compat.foreach_add_(kept, others)
    _compat.foreach_subtract_(kept, [2 * b for b in others])
    assert same(kept, wanted)
    _compat.foreach_add_(kept, others, -3.0)
    assert same(kept, [a.add(b, alpha=-3.0) for a, b in zip(wanted, others, strict=True)])
