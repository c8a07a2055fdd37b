"""Members with several workers, as real processes: equal to one worker, exact resumes, common ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import loop_cases, train_child
from kit.loop_cases import read_weights
from kit.ranks import run_ranks

from ensemble.store import RunDir, load_predictions

Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    for world in (1, 2, 3):
        (folder / str(world)).mkdir()
    return folder


RANKS = {"two": (2, train_child.WITH_TWO), "second": (2, train_child.SECOND), "three": (3, train_child.WITH_THREE)}


@pytest.fixture(scope="module")
def ask(folder: Path) -> Callable[[str], Said]:
    """What each of the ranks said of the cases of a tier, or of the tier that has this case."""
    trained: dict[str, Said] = {}

    def ask(case: str) -> Said:
        tier = case if case in RANKS else "second" if case in train_child.SECOND else "two"
        world, cases = RANKS[tier]
        if tier not in trained:
            trained[tier] = run_ranks(world, train_child.train_cases, world, cases, folder / str(world))
        return trained[tier]

    return ask


@pytest.fixture(scope="module")
def two(ask: Callable[[str], Said]) -> Said:
    return ask("two")


@pytest.fixture(scope="module")
def second(ask: Callable[[str], Said]) -> Said:
    return ask("second")


@pytest.fixture(scope="module")
def three(ask: Callable[[str], Said]) -> Said:
    return ask("three")


def tiered(*cases: str) -> list[Any]:
    """Values of a parameter, each in the tier in which two workers train it."""
    return [pytest.param(each, marks=pytest.mark.more if each in train_child.SECOND else ()) for each in cases]


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    names = ("smooth", "float64", "ragged", "folds", "clipped", "head")
    return {name: train_child.train_case(name, folder / "1") for name in names}


def of(said: dict[str, Any], type: str) -> list[dict[str, Any]]:
    return loop_cases.of(said["events"], type)


def digest(said: dict[str, Any]) -> str:
    return str(of(said, "finished")[0]["weights_sha256"])


@pytest.mark.parametrize("case", tiered("smooth", "float64", "ragged", "folds", "head"))
def test_two_workers_are_one(ask: Callable[[str], Said], one: dict[str, Any], folder: Path, case: str) -> None:
    rtol = 1e-5 if case == "smooth" else 1e-12
    check_equal(folder / "1", folder / "2", one, ask(case), case, rtol)


@pytest.mark.parametrize("case", ["ragged", "clipped in 2"])
def test_three_workers_are_one(three: Said, one: dict[str, Any], folder: Path, case: str) -> None:
    as_in = train_child.ACCUMULATED.get(case, case)
    check_equal(folder / "1", folder / "3", one, three, case, 1e-12, as_in)


def test_workers_that_sum_by_way_of_groups_are_one(three: Said, one: dict[str, Any], folder: Path) -> None:
    check_equal(folder / "1", folder / "3", one, three, "clipped in groups", 1e-12, "clipped")
    plans = of(three[0]["clipped in groups"], "plan")
    assert [plan["tuned"]["groups"] for plan in plans] == [[[0, 1], [2]]]


def test_what_was_measured_at_the_start_holds_after_a_resume(three: Said) -> None:
    first, second = of(three[0]["mid-measured"], "plan")
    assert first["tuned"] == second["tuned"] and first["tuned"]["measured"]
    assert three[0]["mid-measured"]["outcomes"] == ["stopped", "finished"]


@pytest.mark.parametrize("case", tiered("clipped", "clipped in 4", "scaled in 2", "folds in 2"))
def test_workers_that_accumulate_and_clip_are_one(ask: Any, one: dict[str, Any], folder: Path, case: str) -> None:
    reference = train_child.ACCUMULATED.get(case, case)
    check_equal(folder / "1", folder / "2", one, ask(case), case, 1e-12, reference)


def check_equal(
    alone: Path, together: Path, one: dict[str, Any], many: Said, case: str, rtol: float, as_in: str | None = None
) -> None:
    as_in = as_in or case
    expected, found = read_weights(alone / as_in), read_weights(together / case)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, atol=rtol * abs(value).max(), err_msg=name)
    for ours, theirs in zip(of(many[0][case], "epoch"), of(one[as_in], "epoch"), strict=True):
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=10 * rtol)
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=10 * rtol)
        assert ours["samples"] == theirs["samples"], "every sample counts once, over all workers"


RESUMED = {"mid-fp32": "whole-fp32", "end-fp32": "whole-fp32", "mid-bf16": "whole-bf16"}
RESUMED |= {"mid-bootstrap": "bootstrap", "mid-noisy in 2": "noisy in 2", "mid-qsgd4": "qsgd4"}
RESUMED |= {"mid-powersgd": "powersgd", "mid-fp16-onebit": "fp16-onebit"}


def check_resumed(said: Said, case: str, whole: str) -> None:
    assert all(rank[case]["outcomes"][-2:] == ["stopped", "finished"] for rank in said)
    assert digest(said[0][case]) == digest(said[0][whole])
    resumed, undisturbed = (of(said[0][c], "epoch")[-1] for c in (case, whole))
    assert resumed["train_loss"] == undisturbed["train_loss"]
    assert resumed["metrics"] == undisturbed["metrics"]


def test_compression_changes_the_weights_and_the_bytes_but_not_the_agreement(two: Said) -> None:
    plain, packed = digest(two[0]["whole-fp32"]), digest(two[0]["qsgd4"])
    assert plain != packed
    sent = [of(two[0][case], "epoch")[0]["sent_bytes"] for case in ("whole-fp32", "qsgd4")]
    assert sent[1] < sent[0], "also where all but the weights are left alone"


@pytest.mark.more
def test_an_overflow_under_compression_is_one_skipped_step(second: Said) -> None:
    for case in ("fp16-onebit", "mid-fp16-onebit"):
        assert [e["skipped_steps"] for e in of(second[0][case], "epoch")] == [1, 0, 0]
        assert [e["loss_scale"] for e in of(second[0][case], "epoch")] == [32768.0] * 3


def test_workers_that_see_different_checkpoints_say_so(two: Said) -> None:
    for said in two:
        assert said["apart"]["outcomes"] == ["stopped", "failed"]
    assert "must be shared by all nodes" in of(two[0]["apart"], "failed")[0]["error"]


@pytest.mark.parametrize("case", tiered(*RESUMED))
def test_two_workers_resume_to_the_bits_of_an_undisturbed_training(ask: Callable[[str], Said], case: str) -> None:
    check_resumed(ask(case), case, RESUMED[case])
    stopped = {"mid-fp32": [(0, 3)], "end-fp32": [(1, 0)]}
    if case in stopped:
        assert [(e["epoch"], e["step"]) for e in of(ask(case)[0][case], "stopped")] == stopped[case]


def test_three_workers_in_groups_resume_to_the_bits_of_an_undisturbed_training(three: Said) -> None:
    check_resumed(three, "mid-grouped", "grouped")


def test_a_train_function_is_the_recipe_loop(two: Said) -> None:
    assert digest(two[0]["loop"]) == digest(two[0]["whole-fp32"])


def test_predictions_of_all_workers_are_saved_in_order(two: Said, folder: Path) -> None:
    for case in ("whole-fp32", "loop"):
        saved = load_predictions(RunDir(folder / "2" / case).predictions("member-0", 0), "valid")
        assert saved.index.tolist() == list(range(13))
        assert saved.values.sum(axis=1) == pytest.approx(np.ones(13), abs=1e-6)
        accuracy = of(two[0][case], "finished")[0]["metrics"]["accuracy"]
        assert (saved.values.argmax(axis=1) == saved.target).mean() == pytest.approx(accuracy)


def check_overflow(said: Said, case: str, skipped: list[int], scale: float, folder: Path) -> None:
    assert all(rank[case]["outcomes"] == ["stopped", "finished"] for rank in said)
    assert [e["skipped_steps"] for e in of(said[0][case], "epoch")] == skipped
    assert loop_cases.checkpoint(folder / "2" / case)["precision"]["scaler"]["scale"] == scale
    assert all(np.isfinite(value).all() for value in read_weights(folder / "2" / case).values())


def test_an_overflow_on_one_worker_skips_the_step_on_all(two: Said, folder: Path) -> None:
    check_overflow(two, "fp16", [1, 0, 0], 2.0**15, folder)  # once, then the scale is low enough for good


@pytest.mark.more
def test_a_static_loss_scale_stays_through_overflows_and_a_resume(second: Said, folder: Path) -> None:
    check_overflow(second, "fp16-static", [1, 1, 1], 2.0**16, folder)  # sample 7 overflows in each epoch


def test_a_worker_without_a_sample_trains_in_fp16_from_the_first_step_and_after_a_resume(two: Said) -> None:
    assert all(rank["fp16-empty"]["outcomes"] == ["stopped", "finished"] for rank in two), two[0]["fp16-empty"]
    assert [e["samples"] for e in of(two[0]["fp16-empty"], "epoch")] == [5, 5]


def test_a_nan_on_one_worker_ends_all_and_names_step_and_rate(two: Said) -> None:
    assert all(rank["nan"]["outcomes"] == ["failed"] for rank in two)
    (failed,) = of(two[0]["nan"], "failed")
    assert failed["reason"] == "nan" and not failed["retry"]
    assert "loss is nan" in failed["error"] and "learning rate 0.05" in failed["error"]
    assert "epoch 0, step " in failed["error"]
    assert not of(two[1]["nan"], "failed")


def test_what_rank_0_is_told_holds_for_all(two: Said, folder: Path) -> None:
    assert [rank["cancel"]["outcomes"] for rank in two] == [["cancelled"]] * 2
    assert len(of(two[0]["cancel"], "epoch")) == 1
    assert [rank["awaits_pruner"]["outcomes"] for rank in two] == [["pruned"]] * 2
    assert len(of(two[0]["awaits_pruner"], "epoch")) == 2


def test_a_fault_of_one_worker_is_told_by_rank_0_with_its_cause(two: Said, folder: Path) -> None:
    assert all(rank["fault"]["outcomes"] == ["failed"] for rank in two)
    (failed,) = of(two[0]["fault"], "failed")
    assert failed["error"] == "RuntimeError: the fault of rank 1"
    assert failed["reason"] == "error" and failed["retry"]
    log = (folder / "2" / "fault" / "members" / "member-0" / "log.txt").read_text()
    assert "rank 1: Traceback" in log


def test_only_rank_0_tells_of_the_member_and_all_tell_their_use(two: Said) -> None:
    for rank, said in enumerate(two):
        types = {event["type"] for event in said["whole-fp32"]["events"]}
        assert ("epoch" in types) is (rank == 0)
        usage = of(said["whole-fp32"], "usage")
        assert {e["role"] for e in usage} == {"startup", "train", "prepare"}
        assert {e["rank"] for e in usage} == {rank}


@pytest.mark.parametrize("case", tiered("kept", "swa"))
def test_all_ranks_decide_alike_and_have_the_weights_that_are_kept(ask: Any, folder: Path, case: str) -> None:
    """They stop after the same epoch, and each predicts its rows with the weights of the checkpoint."""
    said = ask(case)
    assert [rank[case]["outcomes"] for rank in said] == [["finished"]] * 2
    (end,) = of(said[0][case], "finished")
    assert end["early_stopping"] and end["epoch"] < 8 and end["kept"]["epoch"] <= end["epoch"] - 2
    (batch,) = train_child.data(13, 1).loader(13, 1)
    model = train_child.noisy({})
    model.load_state_dict({k: torch.from_numpy(v) for k, v in read_weights(folder / "2" / case).items()})
    with torch.no_grad():
        expected = model.eval()(batch["x"][batch["index"].argsort()]).softmax(dim=1).numpy()
    found = load_predictions(RunDir(folder / "2" / case).predictions("member-0", 0), "valid").values
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert of(said[0][f"mid-{case}"], "finished") == [end], "resumed, they keep and stop as if undisturbed"
    assert [rank[f"mid-{case}"]["outcomes"][-1] for rank in said] == ["finished"] * 2


@pytest.mark.more
def test_workers_whose_model_is_compiled_end_with_the_same_bits(tmp_path: Path) -> None:
    """Also stopped within an epoch; their gradients are exchanged while the backward pass runs."""
    said = run_ranks(2, train_child.train_cases, 2, train_child.COMPILED, tmp_path)
    assert said[0]["compiled"]["outcomes"] == ["stopped", "finished"]
    compiled, plain = (of(said[0][case], "finished")[0] for case in train_child.COMPILED)
    assert {**compiled, "attempt": 0} == {**plain, "attempt": 0}


def test_a_member_ends_with_all_its_ranks_where_one_of_them_stops_it(two: Said) -> None:
    assert [rank["stop of rank 1"]["outcomes"] for rank in two] == [["finished"], ["finished"]]
    (end,) = of(two[0]["stop of rank 1"], "finished")
    assert end["epoch"] == 1
    assert end["early_stopping"] == {"reason": "good enough", "epochs": 5}


@pytest.mark.more
def test_a_member_ends_with_the_same_weights_whichever_of_its_ranks_end_it(two: Said, second: Said) -> None:
    others = ("leave of rank 0", "stop of both")
    assert [rank[name]["outcomes"] for rank in second for name in others] == [["finished"]] * 4
    ends = [of(two[0]["stop of rank 1"], "finished")[0], *(of(second[0][name], "finished")[0] for name in others)]
    assert {end["epoch"] for end in ends} == {1}
    assert len({end["weights_sha256"] for end in ends}) == 1


@pytest.mark.more
def test_weights_that_rank_0_hands_over_are_those_of_all_ranks(second: Said) -> None:
    assert [rank["handed over"]["outcomes"] for rank in second] == [["finished"], ["finished"]]
    assert of(second[0]["handed over"], "finished")[0]["metrics"] == {"loss": 0.5}
