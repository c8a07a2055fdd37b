"""`Recipe.base`: members that stand on one frozen network train as on their own copy, and keep nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import base_spec
import pytest
import torch
from kit.finished_runs import finished_hashes, of_kind
from safetensors.torch import load_file
from torch import nn

import ensemble
from ensemble import EMA, SWA, Recipe, SpecError
from ensemble.controller.node_table import NodeTable
from ensemble.events import BaseMade, Epoch
from ensemble.reporting.dashboard.run_section import describe_run
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.summary import summary_text
from ensemble.schedule.needs import Node
from ensemble.schedule.packing import pack
from ensemble.store import (
    RunDir,
    RunState,
    StoreError,
    load_checkpoint,
    load_predictions,
    read_events,
    read_state,
)
from pipelines.ipc.child_processes import child_environment

HERE = Path(__file__).parent


def train(folder: Path, executor: str = "inline", **options: Any) -> Path:
    ensemble.submit(base_spec.make(**options), folder, executor=executor).wait()
    return folder


def checkpoints(folder: Path) -> list[Path]:
    run, state = RunDir(folder), read_state(folder / "events.jsonl")
    return [run.valid_checkpoint(member) for member in state.members.values()]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two heads."""
    return train(tmp_path_factory.mktemp("heads") / "run", combine="average")


def test_members_have_the_bits_of_members_with_a_copy_of_their_own(heads: Path, tmp_path: Path) -> None:
    own = train(tmp_path / "own", model=base_spec.private_head, base=None)
    for shared, private in zip(checkpoints(heads), checkpoints(own), strict=True):
        trained, everything = load_checkpoint(shared)["model"], load_checkpoint(private)["model"]
        assert sorted(trained) == ["out.bias", "out.weight"] and len(everything) > 8
        assert all(torch.equal(trained[name], everything[name]) for name in trained)
    for member in ("member-0", "member-1"):
        one, other = (load_predictions(RunDir(run).predictions(member), "valid") for run in (heads, own))
        assert one.values.tobytes() == other.values.tobytes()


def test_what_a_member_puts_inside_the_base_trains_and_the_base_stays_in_evaluation_mode(tmp_path: Path) -> None:
    run = train(tmp_path / "run", model=base_spec.adapter, members=[{"lr": 0.01}])
    built = ensemble.load(run).members["member-0"]
    built.train()
    modes = {name: module.training for name, module in built.named_modules()}
    assert modes["drop"] and modes["base.second.drop"] and modes["base.second.down"]
    assert not any(modes[name] for name in ("base", "base.first", "base.norm", "base.drop", "base.second.inner"))
    (checkpoint,) = checkpoints(run)
    saved = load_checkpoint(checkpoint)
    assert {name for name in saved["model"] if "base" in name} == {
        "base.second.down.weight",
        "base.second.up.weight",
    }
    assert saved["base"]["source"] == "base_spec.load_base"


def mapped(smaps: str, field: str) -> int:
    """The bytes of a field of the mappings of the base's file."""
    total, is_base = 0, False
    for line in smaps.splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_base = words[-1].endswith(".pt")
        elif is_base and words[0] == f"{field}:":
            total += 1024 * int(words[1])
    return total


def test_members_of_a_node_hold_the_base_once(tmp_path: Path) -> None:
    members = [{"lr": 0.1 * (1 + number), "folder": str(tmp_path)} for number in range(base_spec.MEMBERS)]
    options = {"cpus_per_worker": 0.125, "memory_gb": 0.5}
    declared = {"model": base_spec.probe, "base": base_spec.load_large, "members": members, "epochs": 1}
    run = train(tmp_path / "run", "local", resources=ensemble.Resources(**options), **declared)
    assert set(finished_hashes(run)) == {f"member-{number}" for number in range(base_spec.MEMBERS)}
    maps = [file.read_text() for file in tmp_path.glob("memory-*")]
    assert len(maps) == base_spec.MEMBERS
    assert [mapped(text, "Rss") > 0.99 * base_spec.BASE_BYTES for text in maps] == [True] * base_spec.MEMBERS
    assert sum(mapped(text, "Pss") for text in maps) < 1.05 * base_spec.BASE_BYTES
    assert sum(mapped(text, "Private_Dirty") for text in maps) == 0
    own = [event["memory_gb"] * 2**30 for event in of_kind(run, "epoch")]
    assert max(own) < base_spec.BASE_BYTES, "what a member is measured to hold is its own"


@pytest.mark.parametrize("averaging", [None, EMA(), SWA()])
def test_a_checkpoint_holds_what_is_trained(averaging: Any, tmp_path: Path) -> None:
    members, options = [{"lr": 0.01, "rank": 256}], {} if averaging is None else {"averaging": averaging}
    run = train(
        tmp_path / "run", model=base_spec.wide_adapter, base=base_spec.load_wide, members=members, **options
    )
    (checkpoint,) = checkpoints(run)
    trained = sum(tensor.nbytes for tensor in load_checkpoint(checkpoint)["model"].values())
    copies = 1 if averaging is None else 3  # those that count, those in training, and the averages
    assert checkpoint.stat().st_size < 1.1 * copies * trained
    (file,) = (run / "base").glob("*.pt")
    assert trained < file.stat().st_size


def test_a_killed_run_goes_on_from_the_file_and_calls_the_function_no_more(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    program = (
        "import base_spec, ensemble, sys\n"
        "options = {'members': [{'lr': 0.01}], 'epochs': 400, 'checkpoint_every': 5}\n"
        "made = base_spec.make(base_spec.adapter, base_spec.load_counted, **options)\n"
        "ensemble.submit(made, sys.argv[1], executor=sys.argv[2]).wait()\n"
    )
    path = os.pathsep.join([str(HERE), *sys.path])
    environment = {**os.environ, "BASE_CALLS": str(calls), "PYTHONPATH": path}
    command = [sys.executable, "-c", program, str(tmp_path / "run"), "local"]
    with subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL) as driver:
        while not of_kind(tmp_path / "run", "checkpoint"):
            assert driver.poll() is None
            time.sleep(0.01)
        os.killpg(driver.pid, signal.SIGKILL)
    assert read_state(tmp_path / "run/events.jsonl").members["member-0"].state != "finished"
    ensemble.resume(tmp_path / "run").wait()
    assert calls.read_text() == "called\n"
    subprocess.run(
        [*command[:3], str(tmp_path / "whole"), "inline"], env=environment, check=True, capture_output=True
    )
    assert finished_hashes(tmp_path / "run") == finished_hashes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (base_spec.add_in_place, "first.weight"),
        (base_spec.add_to_data, "first.weight"),
        (base_spec.normalise_by_batch, "norm.num_batches_tracked"),
    ],
)
def test_a_write_to_the_base_is_an_error_that_names_what_was_written(loss: Any, name: str, tmp_path: Path) -> None:
    train(tmp_path / "run", members=[{"lr": 0.1}], loss=loss)
    (failed,) = of_kind(tmp_path / "run", "failed")
    assert f"written to {name} of the frozen base (base_spec.load_base)" in failed["error"] and not failed["retry"]


def returns_none() -> None:
    return None


def takes_arguments(params: Any) -> Any:
    return nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("mistake", "names"),
    [
        (lambda: Recipe(model=base_spec.head, base=takes_arguments, loss="mse"), ("Recipe.base", "base()")),
        (lambda: Recipe(model=base_spec.private_head, base=returns_none, loss="mse"), ("model(params, base)",)),
        (lambda: Recipe(model=base_spec.head, base="/no/folder", loss="mse"), ("Recipe.base", "/no/folder")),
        (lambda: Recipe(model=base_spec.head, base=returns_none, train=print), ("Recipe.base",)),
        (lambda: submitted(base=returns_none), ("Recipe.base", "returns_none", "None")),
        (lambda: submitted(base=fails), ("Recipe.base", "no weights here")),
        (lambda: dry(base=returns_none), ("Recipe.base", "returns_none", "None")),
        (lambda: submitted(base=base_spec.load_stateful), ("base_spec.load_stateful", "get_extra_state")),
    ],
)
def test_mistakes_are_refused_at_the_start(
    mistake: Callable[[], Any], names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as refused:
        mistake()
    assert [name for name in names if name not in str(refused.value)] == []


def fails() -> Any:
    raise ValueError("no weights here")


def submitted(**options: Any) -> Any:
    return ensemble.submit(base_spec.make(**options), "run", executor="inline").wait()


def dry(**options: Any) -> Any:
    return ensemble.dry_run(base_spec.make(**options), "run", executor="inline")


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (base_spec.unfrozen, ("base.second.weight", "copy.deepcopy()")),
        (base_spec.cast, ("first.weight", "cast")),
        (base_spec.stateful_head, ("Recipe.model", "more", "get_extra_state")),
    ],
)
def test_models_that_the_base_does_not_allow_are_refused(
    model: Any, names: tuple[str, ...], tmp_path: Path
) -> None:
    run = train(tmp_path / "run", model=model)
    failures = [failed["error"] for failed in of_kind(run, "failed")]
    assert len(failures) == 2 and all(name in failure for name in names for failure in failures)


def test_initial_weights_of_a_base_are_the_same_in_each_run(tmp_path: Path) -> None:
    runs = [train(tmp_path / name, members=[{"lr": 0.1}], base=random_base) for name in ("one", "other")]
    assert len({file.name for run in runs for file in (run / "base").glob("*.pt")}) == 1


def test_weights_of_another_base_are_refused_before_training_with_both_digests(
    heads: Path, tmp_path: Path
) -> None:
    started = {"members": [ensemble.Member({"lr": 0.1}, start=heads / "member-0")], "epochs": 1}
    assert set(finished_hashes(train(tmp_path / "same", **started))) == {"member-0"}
    run = train(tmp_path / "run", base=base_spec.load_scaled, **started)
    (was,), (own,) = ([file.stem for file in (folder / "base").glob("*.pt")] for folder in (heads, run))
    assert was != own, "they differ in a buffer that no state_dict has"
    (failed,) = of_kind(run, "failed")
    assert was[:16] in failed["error"] and own[:16] in failed["error"] and not of_kind(run, "epoch")
    with pytest.raises(SpecError, match=was[:16]):
        ensemble.dry_run(base_spec.make(base=base_spec.load_scaled, **started), tmp_path / "dry", executor="local")


def random_base() -> nn.Module:
    return base_spec.Encoder()


def test_a_dry_run_counts_the_base_once(tmp_path: Path) -> None:
    plan = ensemble.dry_run(base_spec.make(base=base_spec.load_wide), tmp_path / "run", executor="local")
    (note,) = (note for note in plan.notes if "base_spec.load_wide" in note)
    row = plan.members[0]
    assert "once on each node" in note and row["error"] is None
    assert row["checkpoint_bytes"] < 2**14 < row["parameters"], "a checkpoint has what is trained"
    assert not (tmp_path / "run").exists()


def dry_run_of_eight() -> None:
    members = [{"lr": 0.1 * (1 + number), "folder": None} for number in range(8)]
    declared = base_spec.make(base_spec.plain_probe, base_spec.load_large, members=members, epochs=1)
    plan = ensemble.dry_run(declared, executor="local")
    print(json.dumps([plan.members[0]["memory_gb"], plan.run, str(plan)]))


def test_a_dry_run_adds_up_the_memory_of_the_base_and_of_eight_members() -> None:
    """In a process of its own: what is measured is how much it grows."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_base; test_base.dry_run_of_eight()"
    printed = subprocess.run([sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True)
    own_gb, run, text = json.loads(printed.stdout.splitlines()[-1])
    base_gb = base_spec.BASE_BYTES / 2**30
    assert run["base_gb"] == base_gb and run["at_once"] == 8 and 0 < own_gb < base_gb
    assert run["memory_gb"] == pytest.approx(base_gb + 8 * own_gb)
    assert "(base 200 MiB + 8 x " in text


def test_the_packer_counts_the_base_once_on_each_node() -> None:
    made = BaseMade(digest="", file="", bytes=4 * 2**30, source="", code="")
    nodes = [Node("a", 64, (), 10.0, "a"), Node("b", 64, (), 10.0, "b", memory_left_gb=7.0)]
    resources = ensemble.Resources(cpus_per_worker=0.1, memory_gb=1.0)
    declared = base_spec.make(members=[{"lr": 1.0 + number} for number in range(30)], resources=resources)
    waiting = [declared.identify(number) for number in range(30)]
    for state, expected in ((RunState(base=made), {"a": 6, "b": 3}), (RunState(), {"a": 10, "b": 7})):
        placed = pack(waiting, [], NodeTable(state, nodes).packed)
        assert Counter(placement.node for placement in placed) == expected
    cluster = NodeTable(RunState(base=made), nodes, list_cluster=lambda: nodes)
    assert cluster.packed == nodes, "what is leased is sized to the members"
    assert [node.memory_gb for node in cluster.list_potential()] == [6.0, 6.0]


def test_making_the_base_is_shared_work_with_a_row_of_its_own(heads: Path) -> None:
    ledger = RunProjection.from_events(read_events(RunDir(heads).events)).ledger
    (row,) = (row for row in ledger.rows if row.role == "base")
    shared = [row for row in ledger.full_rows if row.role == "base"]
    assert row.member is None and row.cpu_s > 0.1
    assert {row.member for row in shared} == {"member-0", "member-1"}
    assert sum(row.cpu_s for row in shared) == row.cpu_s
    joules = [one.energy_j for one in shared if one.energy_j is not None]
    assert (sum(joules) if joules else None) == row.energy_j


def test_page_and_summary_say_what_the_base_and_a_member_take(heads: Path) -> None:
    lines, events = summary_text(RunDir(heads), everything=True), list(read_events(RunDir(heads).events))
    assert "the base of base_spec.load_base takes" in lines and "once on each node, each member at most" in lines
    last = max(at for at, event in enumerate(events) if isinstance(event, Epoch))
    for part, is_running in ((events, False), (events[: last + 1], True)):
        facts = describe_run("run", RunProjection.from_events(part), None, {})["facts"]
        (fact,) = (fact["text"] for fact in facts if fact["label"] == "memory")
        assert "once on each node" in fact and (" + 1 x " in fact) == is_running, "inline trains one at a time"


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-1] + b"x")])
def test_a_damaged_or_missing_base_is_refused(damage: Callable[[Path], Any], heads: Path, tmp_path: Path) -> None:
    run = shutil.copytree(heads, tmp_path / "run")
    (file,) = (run / "base").glob("*.pt")
    digest = file.stem
    damage(file)
    for use in (lambda: ensemble.load(run), lambda: ensemble.resume(run, epochs=3).wait()):
        with pytest.raises(StoreError, match=f"{digest}.*base_spec.load_base"):
            use()


def test_a_loaded_run_computes_the_base_once_and_members_that_changed_it_hold_its_tensors_once(
    heads: Path, tmp_path: Path
) -> None:
    model, calls = ensemble.load(heads), []
    one, other = model.members.values()
    assert one.base is other.base
    one.base.first.register_forward_hook(lambda *call: calls.append(call))
    x = torch.randn(4, base_spec.INPUTS)
    values = model({"x": x})
    assert len(calls) == 1
    alone = [torch.softmax(member(x), -1) for member in model.members.values()]
    assert len(calls) == 3 and torch.equal(values.argmax(-1), sum(alone).argmax(-1))
    adapters = ensemble.load(train(tmp_path / "run", model=base_spec.adapter, combine="average"))
    one, other = adapters.members.values()
    assert one.base is not other.base and one.base.second.up is not other.base.second.up
    assert one.base.second.inner.weight is other.base.second.inner.weight


def test_an_artifact_holds_the_base_once_and_needs_none_of_the_users_modules(heads: Path, tmp_path: Path) -> None:
    ensemble.export(heads, tmp_path / "artifact")
    program = (
        "import sys, torch\n"
        "model = torch.export.load(sys.argv[1]).module()\n"
        f"print(model({{'x': torch.ones(2, {base_spec.INPUTS})}}).tolist())\n"
        "products = [node for node in model.graph.nodes if 'linear' in str(node.target)]\n"
        "print(len(products), 'base_spec' in sys.modules, 'ensemble' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "artifact/model.pt2")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    values, parts = done.stdout.splitlines()
    expected = ensemble.load(heads)({"x": torch.ones(2, base_spec.INPUTS)})
    assert json.loads(values) == expected.tolist()
    assert parts == "4 False False", "two layers of the base, and a head of each member"
    weights = load_file(tmp_path / "artifact/model.safetensors")
    assert len([name for name in weights if name.endswith("base.first.weight")]) == 1
