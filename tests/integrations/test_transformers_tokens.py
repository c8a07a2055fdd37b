"""Token classification by a Trainer of transformers, whose collator pads each batch to its longest text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from kit.finished_runs import of_kind
from kit.tv import import_torchvision

import ensemble
from ensemble import Resources
from ensemble.store import RunDir, load_predictions

pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore")]
#: All that is remarked.
DEFAULTS = "TrainingArguments left at their defaults follow the Ensemble"
LONGEST, MEMBERS = 24, [{"seed": seed, "dropout": 0.0} for seed in (0, 1)]


def pad(samples: Any, length: int) -> dict[str, Any]:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {name: samples[name].padded(value, length) for name, value in fill.items()}


def pad_to_longest(batch: Any) -> dict[str, Any]:
    return pad(batch, int(batch["input_ids"].lengths.max()))


def pad_to_max(batch: Any) -> dict[str, Any]:
    return pad(batch, LONGEST)


@pytest.mark.parametrize("executor", ["inline", "local"])
def test_texts_padded_to_the_longest_have_the_figures_of_others(
    tmp_path: Path, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_torchvision(monkeypatch)
    pytest.importorskip("transformers")
    results, epochs = [], []
    for name, collate in (("longest", pad_to_longest), ("max", pad_to_max)):
        declared = programs.tokens_members(MEMBERS, collate, resources=Resources(cpus_per_worker=0.5))
        results.append(ensemble.submit(declared, tmp_path / name, executor).wait())
        assert not [each["error"] for each in of_kind(tmp_path / name, "failed")]
        assert len(of_kind(tmp_path / name, "finished")) == 2
        assert {text["text"].partition(":")[0] for text in of_kind(tmp_path / name, "remark")} == {DEFAULTS}
        epochs.append({(e["member"], e["epoch"]): e["metrics"] for e in of_kind(tmp_path / name, "epoch")})
    for key, metrics in epochs[0].items():
        assert metrics == pytest.approx(epochs[1][key], rel=1e-3)
    saved = [
        load_predictions(RunDir(tmp_path / name).predictions("member-1"), "valid") for name in ("longest", "max")
    ]
    assert [each.values.shape[2] for each in saved] == [programs.TAGS] * 2
    assert saved[0].values.shape[1] < LONGEST == saved[1].values.shape[1]
    values = [each.values[each.target != -100] for each in saved]
    np.testing.assert_allclose(values[0], values[1], atol=1e-3)
    for of, metrics in results[1].combined.metrics.items():
        assert results[0].combined.metrics[of] == pytest.approx(metrics, rel=0.01, nan_ok=True)
