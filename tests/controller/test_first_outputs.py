"""What is remarked of the first predictions of members."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ensemble.controller.first_outputs import FirstOutputs

from ensemble import Ensemble, Recipe, Search, uniform
from pipelines import Pipeline, sources


def average(values: Any) -> Any:
    return values.mean(0)


@pytest.mark.parametrize("combine", ["average", average])
@pytest.mark.parametrize("is_search", [False, True])
def test_outputs_of_a_free_task_are_combined_by_a_function_alone(combine: Any, is_search: bool) -> None:
    members: Any = {"search": Search({"lr": uniform(0, 1)}, trials=2)} if is_search else {"members": [{"lr": 0.1}]}
    recipe = Recipe(model=print, loss=print, task="free", objective="loss")
    pipe = Pipeline(sources.arrays(label=np.arange(8)))
    declared = Ensemble(name="free", recipe=recipe, train=pipe, valid=pipe, combine=combine, **members)
    event = {"member": "member-0", "values": [[1.0], [2.0]], "task": {"kind": "free"}}
    remark = FirstOutputs(declared).find_remark(event)
    if combine is average:
        assert remark is None
    else:
        assert remark is not None and "declare Ensemble.combine as a function" in remark
