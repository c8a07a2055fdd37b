"""Members in fp16, trained by `ensemble.train`: the loss falls, and a step whose gradients overflow is skipped."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_cases.common import Row, Setting, check
from gpu_cases.networks import MADE_UP, text_pipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kit import train_child

from benchmarks import models
from benchmarks.members import declare
from ensemble.spec import Member
from ensemble.train import Inbox, work


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    device = setting.choose("cuda:0", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        for precision, scale in (("fp32", "dynamic"), ("fp16", "dynamic"), ("fp16", 1024.0), ("bf16", "dynamic")):
            yield _train(setting, Path(folder), device, precision, scale)
        for case, expected in (("fp16", [1, 0, 0]), ("fp16-static", [1, 1, 1])):
            found = train_child.train_case(case, Path(folder), device=device)
            skipped = [event["skipped_steps"] for event in found["events"] if event["type"] == "epoch"]
            passed = skipped == expected and found["outcomes"] == ["stopped", "finished"]
            yield check(
                f"an overflow skips one step ({case})", passed, skipped=skipped, outcomes=found["outcomes"]
            )


def _train(setting: Setting, folder: Path, device: str, precision: Any, loss_scale: Any) -> Row:
    net = setting.choose(models.NETS["lstm"], models.net_of("lstm", words=50, embed=8, hidden=8, length=8))
    data = text_pipeline(net, setting.choose(4096, 32))
    member = Member(net.params(MADE_UP), seed=0, precision=precision, loss_scale=loss_scale)
    size = setting.choose(128, 8)
    ensemble = declare("scaling", net, data, data, [member], 3, batch_size=size, valid=None)
    what = f"lstm, {precision}, loss scale {loss_scale}"
    events: list[dict[str, Any]] = []
    job = train_child.make_job(folder / what, ensemble, device=device)
    outcome = work(job, ensemble, events.append, Inbox())
    epochs = [event for event in events if event["type"] == "epoch"]
    losses = [event["train_loss"] for event in epochs]
    failure = [event["error"] for event in events if event["type"] == "failed"]
    return check(
        what,
        outcome == "finished" and losses[-1] < 0.999 * losses[0],
        outcome=outcome,
        losses=losses,
        skipped=[event["skipped_steps"] for event in epochs],
        **(_last_epoch(epochs[-1]) if epochs else {}),
        **({"error": failure[0]} if failure else {}),
    )


def _last_epoch(event: dict[str, Any]) -> dict[str, Any]:
    return {"loss_scale": event["loss_scale"] or 1.0, "samples_per_s": event["samples_per_s"]}
