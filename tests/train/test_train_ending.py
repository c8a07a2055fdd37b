"""A train function ends its member before the last epoch, or hands over weights of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import train_child as cases
from kit.loop_cases import checkpoint, finished, give_more_epochs, kill, of, own_loop, predictions, train

from ensemble.reporting.sections.notices import describe_early_stop
from ensemble.spec import EMA, SWA
from ensemble.store import weights_sha256

KEPT: dict[str, dict[str, Any]] = {"last": {}, "best": {"keep": "best", "objective": "loss"}}
KEPT |= {"ema": {"averaging": EMA(0.8)}, "swa": {"averaging": SWA(1)}}


def resume_from_the_end(folder: Path, loop: Any, again: Any, **options: Any) -> dict[str, Any]:
    """A loop dies where the last checkpoint is written and nobody has been told; the end by another loop."""
    assert of(kill(folder, loop, lambda event: event["type"] == "finished", **options), "checkpoint")
    outcome, events = train(folder, again, attempt=1, **options)
    assert outcome == "finished" and not of(events, "epoch")
    return {**of(events, "finished")[0], "attempt": 0}


def test_ending_after_a_whole_epoch_is_what_fewer_epochs_are(tmp_path: Path) -> None:
    for name, options in KEPT.items():
        short = finished(tmp_path / name / "short", cases.ending("not", 9), epochs=2, **options)
        for way in ("stop", "stop at once", "break", "break before"):
            folder = tmp_path / name / way
            outcome, events = train(folder, cases.ending(way, 1), epochs=6, **options)
            assert outcome == "finished", (name, way, of(events, "failed"))
            (end,) = of(events, "finished")
            stop = end.pop("early_stopping")
            reason = "good enough" if way.startswith("stop") else "its train function left member.epochs()"
            assert stop == {"reason": reason, "epochs": 6}
            assert end == short, (name, way)
            assert np.array_equal(predictions(folder), predictions(tmp_path / name / "short"))
            assert [epoch["samples"] for epoch in of(events, "epoch")] == [23, 23], "each sees every sample once"
    text = describe_early_stop("member-0", 2, stop)
    assert text == "member-0: ended after 2 of 6 epochs: its train function left member.epochs()"
    assert "early_stopping" not in finished(tmp_path / "last", cases.ending("stop", 2), epochs=3)


def test_a_member_that_has_ended_itself_trains_no_more_when_it_is_resumed(tmp_path: Path) -> None:
    options = {"epochs": 6, **KEPT["swa"]}
    whole = finished(tmp_path / "whole", cases.ending("stop", 1), **options)
    ends = (cases.ending("stop", 1), cases.ending("not", 9))
    assert resume_from_the_end(tmp_path / "again", *ends, **options) == whole
    # A resume within the epoch in which it was asked to end ends after it.
    loop = cases.ending("stop once", 1)
    whole = finished(tmp_path / "whole once", loop, **options)
    assert whole["epoch"] == 1
    assert train(tmp_path / "once", loop, cases.Script(8, "stop"), **options)[0] == "stopped"
    assert finished(tmp_path / "once", loop, **options) == whole


def test_what_is_evaluated_after_a_loop_that_was_left_is_what_is_saved(tmp_path: Path) -> None:
    """The running statistics for averaged weights are of an epoch that was trained, and are in the checkpoint."""
    found: list[float] = []

    def measure(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": cases.loss(model, batch)}

    def train_two(member: Any) -> None:
        model = cases.normed(member.params)
        model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in member.epochs():
            for batch in member.batches():
                member.backward(cases.loss(model, batch))
                member.step()
            if epoch == 1:
                break
        found.append(member.evaluate(measure)["loss"])

    finished(tmp_path, train_two, epochs=6, **KEPT["swa"])
    saved, valid = cases.normed({}).eval(), next(iter(cases.data(13, seed=1).loader(13, 1)))
    saved.load_state_dict(checkpoint(tmp_path)["model"])
    assert found == [pytest.approx(float(cases.loss(saved, valid).mean()), rel=1e-6)]


def report(member: Any, epoch: int) -> None:
    member.report(loss=9.0 - epoch)


def hand_over(member: Any, weights: Any) -> None:
    member.use_weights(weights, metrics={"loss": 0.25})
    with member.evaluating() as model:
        found = [(model(b["x"]).softmax(dim=1), b["index"].clone()) for b in member.batches("valid")]
    member.predictions("valid", *map(torch.cat, zip(*found, strict=True)))


@pytest.mark.parametrize("kept", KEPT)
def test_weights_that_are_handed_over_are_the_members(kept: str, tmp_path: Path) -> None:
    options = {"epochs": 3, **KEPT[kept]}
    torch.manual_seed(7)
    other = cases.plain({}).state_dict()
    trained, hands_over = own_loop(report), own_loop(report, lambda member: hand_over(member, other))
    end = finished(tmp_path / "a", hands_over, **options)
    assert end["weights_sha256"] == weights_sha256(other)
    assert (end["metrics"], end["kept"]) == ({"loss": 0.25}, {"by": "use_weights"})
    saved = checkpoint(tmp_path / "a")
    assert weights_sha256(saved["model"]) == end["weights_sha256"]
    last = finished(tmp_path / "last", trained, epochs=3)["weights_sha256"]
    assert weights_sha256(saved["kept"]["trained"]) == last, "those in training stay beside them"
    # A resume whose framework has forgotten its best weights has them from the checkpoint; it predicts nothing.
    again = resume_from_the_end(tmp_path / "b", hands_over, trained, **options)
    assert {**again, "predictions": end["predictions"]} == end
    # Given more epochs it goes on from those in training.
    more = give_more_epochs(tmp_path / "a", trained, 3, **{**options, "epochs": 5})
    if kept in ("last", "best"):
        assert more["weights_sha256"] == finished(tmp_path / "five", trained, epochs=5)["weights_sha256"]
