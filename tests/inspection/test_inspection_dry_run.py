"""A dry run: what it says is what a run then does, it refuses what a run refuses, and leaves nothing behind."""

from __future__ import annotations

import functools
import json
import re
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import inspected_runs
import numpy as np
import psutil
import pytest
import torch
from kit.event_dicts import fold, read_events

import ensemble
from ensemble import Ensemble, Member, Recipe, Resources, Search, SpecError, choice, loguniform
from ensemble.cli.parser import main
from ensemble.store import RunDir, load_checkpoint
from pipelines import Pipeline, sources, stages

SPEC = (
    Path(inspected_runs.__file__).read_text()
    + """

def spec(width: int = 8, workers: int = 1, cpus: float = 1.0):
    members = [{"width": width, "lr": 0.1}, {"width": 2 * width, "lr": 0.1}]
    return declare(members=members, resources=ensemble.Resources(workers=workers, cpus_per_worker=cpus))
"""
)


def list_tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def _add_forms(sample: dict[str, Any]) -> dict[str, Any]:
    box = {"corner": np.ones(2, np.float32)}
    return {**sample, "name": "ab", "steps": np.zeros((int(sample["label"]), 2), np.float32), "box": box}


def _loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    outputs = model(torch.nan_to_num(batch["x"]))
    return torch.nn.functional.cross_entropy(outputs, batch["label"], reduction="none")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dry_spec.py").write_text(SPEC)
    return tmp_path / "dry_spec.py"


def test_it_says_what_the_run_then_does_and_leaves_nothing_behind(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [{"width": 8, "lr": 0.1}, {"width": 8, "lr": 0.2}, {"width": 16, "lr": 0.1}]
    declared = inspected_runs.declare(members=members)
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    found = ensemble.dry_run(declared, tmp_path / "run", executor="inline")
    assert torch.equal(generator, torch.get_rng_state()) and torch.get_num_threads() == threads
    assert list(tmp_path.iterdir()) == []
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children
    assert not list(temporary.iterdir())

    assert found.splits == {"train": 300, "valid": 100, "test": 200} and found.run_state is None
    (x, label) = found.fields
    first = next(iter(declared.pipeline({}).loader(32, 1)))
    assert (x["name"], x["shape"], x["dtype"]) == ("x", [8], "float32")
    expected = [f(first["x"].double()).item() for f in (torch.min, torch.mean, torch.max)]
    assert [x["min"], x["mean"], x["max"]] == pytest.approx(expected)
    assert label["shape"] == []

    small, large = found.members
    assert small["members"] == ["member-0", "member-1"] and small["varied"] == ["lr"] and small["error"] is None
    for row in (small, large):
        width = row["params"]["width"]
        assert row["parameters"] == 8 * width + width + 4 * width + 4
        assert (row["batch_size"], row["steps"], row["epochs"]) == (32, 10, 2)
        assert row["evaluations"] == 2 * 4 + 4 + 7, "valid after each epoch; valid and test at the end"
        seconds = 20 * row["step_s"] + 19 * row["evaluate_s"]
        assert row["step_s"] > 0 and row["seconds"] == pytest.approx(seconds) and row["memory_gb"] > 0
    assert found.run["origin"] == "estimated" and found.run["seconds"] >= 2 * small["seconds"] + large["seconds"]
    assert "estimated" in str(found) and "without starting processes" in found.run["how"]

    ensemble.submit(declared, tmp_path / "run", executor="inline").wait()
    run = RunDir(tmp_path / "run")
    state = fold(read_events(run.events))
    for row in (small, large):
        checkpoint = load_checkpoint(run.valid_checkpoint(state.members[row["members"][0]]))
        assert sum(tensor.numel() for tensor in checkpoint["model"].values()) == row["parameters"]
        assert row["checkpoint_bytes"] >= 4 * row["parameters"]
    again = ensemble.dry_run(declared, tmp_path / "run", executor="inline")
    assert again.run_state == "3 finished" and any("continued" in note for note in again.notes)


@pytest.mark.more
def test_nodes_that_members_select_are_looked_for_here_or_in_the_cluster_at_the_start(tmp_path: Path) -> None:
    declared = inspected_runs.declare(resources=Resources(nodes={"team": "vision", "spot": False}))
    why = r"member-0 asks for .*no node has team=vision \(local: no such label; labels are of the nodes of a Ray"
    with pytest.raises(SpecError, match=why):
        ensemble.dry_run(declared, tmp_path / "run", executor="local")
    found = ensemble.dry_run(declared, tmp_path / "run", executor="ray")
    asked = "whether the cluster has nodes with spot=False, team=vision is checked when the run starts"
    assert found.run["seconds"] > 0 and asked in found.notes


def take_a_millisecond(sample: dict[str, Any]) -> dict[str, Any]:
    until = time.thread_time() + 0.001
    while time.thread_time() < until:
        pass
    return sample


def test_members_on_few_cores_take_as_long_as_their_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENSEMBLE_WATTS_PER_CORE", "7")
    members = ensemble.seeds(40, {"width": 8, "lr": 0.1})
    train = inspected_runs.split(0, 300).map(take_a_millisecond)
    declared = inspected_runs.declare(train=train, members=members, resources=Resources(cpus_per_worker=1.0))
    found = ensemble.dry_run(declared, tmp_path / "run", executor="local")
    (row,) = found.members
    cores = found.node["cpus"]
    assert found.run["at_once"] == min(40, int(cores))
    prepared = -(-40 // found.run["at_once"]) * (declared.samples + 300)  # once for all that train at once
    expected = 40 * row["cpu_s"] + found.pipeline["prepare_s"] * prepared
    assert found.run["cpu_s"] == pytest.approx(expected, rel=1e-9) and found.pipeline["prepare_s"] > 0.0009
    of_time, of_work = row["seconds"] * 40 / found.run["at_once"], found.run["cpu_s"] / cores
    assert found.run["seconds"] == pytest.approx(max(of_time, row["seconds"], of_work))
    assert found.pipeline["unshared"] is None and found.run["memory_gb"] > 0
    if found.node["power"].startswith("estimate (7 W"):
        assert row["energy_j"] == pytest.approx(7 * row["cpu_s"], rel=0.2)
        assert found.run["energy_j"] == pytest.approx(7 * found.run["cpu_s"], rel=0.2)
    assert found.run["energy_origin"] in ("estimated", "unavailable")


def train_by_a_framework(member: Any) -> None:
    """As Lightning does: it validates after as many batches as the loader says that there are, and only then."""
    model = torch.nn.Linear(8, 4)
    model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in member.epochs():
        metrics = {}
        for number, batch in enumerate(member.batches(), 1):
            member.backward(torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none"))
            member.step()
            if number == member.steps_per_epoch:
                with member.evaluating():
                    found = [(model(b["x"]).argmax(1), b["label"]) for b in member.batches("valid")]
                right = [(guess == label).float().mean() for guess, label in found]
                metrics["val_accuracy"] = float(torch.stack(right).mean())
        member.report(accuracy=metrics["val_accuracy"])


def test_a_port_that_validates_after_the_last_batch_is_no_failing_one(tmp_path: Path) -> None:
    x, label = inspected_runs.make_data(5000)  # many more steps than are measured
    options = {"recipe": train_by_a_framework, "optimizer": None, "members": [{"lr": 0.1}], "batch_size": 1}
    declared = inspected_runs.declare(train=Pipeline(sources.arrays(x=x, label=label), seed=0), **options)
    (row,) = ensemble.dry_run(declared, tmp_path / "run", executor="inline").members
    assert row["error"] is None and row["parameters"] == 36 and list(tmp_path.iterdir()) == []
    assert row["step_s"] > 0 and row["evaluate_s"] > 0 and row["checkpoint_bytes"] >= 4 * 36


def test_a_search_is_tried_at_random_points_of_its_space(tmp_path: Path) -> None:
    search = Search({"lr": loguniform(1e-3, 1e-1), "width": choice(8, 16)}, trials=20)
    declared = inspected_runs.declare(members=None, search=search)
    found = ensemble.dry_run(declared, tmp_path / "run", executor="local")
    assert found.mode == "search" and {row["params"]["width"] for row in found.members} <= {8, 16}
    tried = sum(len(row["members"]) for row in found.members)
    mean = sum(row["cpu_s"] * len(row["members"]) for row in found.members) / tried
    assert found.run["cpu_s"] > 20 * mean * 0.99 and any("pruning is ignored" in note for note in found.notes)
    assert list(tmp_path.iterdir()) == []


def test_what_each_member_does_itself_is_named(tmp_path: Path) -> None:
    base = inspected_runs.split(0, 300).map(stages.cast("x", "float32"))
    members = [{"width": 8, "lr": 0.1, "mean": mean} for mean in (0.0, 0.5)]
    train = lambda params: base.map(functools.partial(shift, by=params["mean"]))  # noqa: E731
    declared = inspected_runs.declare(train=train, members=members)
    found = ensemble.dry_run(declared, tmp_path / "run", executor="local")
    assert len(found.pipeline["shared"]) == 1 and found.pipeline["unshared"] is None
    assert [own["members"] for own in found.pipeline["own"]] == [["member-0", "member-1"]]
    assert "by member-0 and 1 more alone: " in str(found)


def shift(sample: dict[str, Any], by: float) -> dict[str, Any]:
    return {**sample, "x": sample["x"] - by}


def fail(params: dict[str, Any]) -> Any:
    if params["width"] == 13:
        raise ValueError("no model of this width")
    return inspected_runs.build_model(params)


def test_members_whose_first_steps_fail_are_named_once_for_all_architectures(tmp_path: Path) -> None:
    members = [{"width": width, "depth": depth, "lr": 0.1} for width, depth in ((13, 1), (8, 1), (13, 2))]
    declared = inspected_runs.declare(members=members, recipe=Recipe(model=fail, loss="cross_entropy"))
    found = ensemble.dry_run(declared, tmp_path / "run", executor="inline")
    bad, good, also = found.members
    assert good["step_s"] > 0 and good["error"] is None
    assert bad["error"] == also["error"] == "ValueError: no model of this width" and bad["seconds"] is None
    assert found.run["seconds"] is None and found.run["origin"] == "unavailable"
    shown = [line for line in str(found).splitlines() if "fail" in line]
    assert shown == ["member-0 and 1 more fail in the first steps: ValueError: no model of this width"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def test_it_refuses_what_a_run_refuses_with_the_same_message(spec: Path, capsys: Any) -> None:
    given = [("inline", "nonsense=3"), ("inline", "width=many"), ("inline", "workers=2"), ("local", "cpus=4000")]
    before = list_tree(spec.parent)
    for executor, setting in given:
        arguments = ["run", str(spec), "--executor", executor, "--set", setting]
        dry = refused([*arguments, "--dry-run"], capsys)
        assert list_tree(spec.parent) == before
        assert dry == refused(arguments, capsys) and dry.count("\n") == 1


def test_the_command_writes_nothing_and_refuses_another_runs_directory(spec: Path, capsys: Any) -> None:
    base = ["run", str(spec), "--executor", "inline", "--run-dir", "run"]
    before = list_tree(spec.parent)
    assert main([*base, "--dry-run", "--json"]) == 0
    assert list_tree(spec.parent) == before
    assert [row["params"]["width"] for row in json.loads(capsys.readouterr().out)["members"]] == [8, 16]
    assert main(base) == 0
    capsys.readouterr()
    before = list_tree(spec.parent)
    changed = [*base, "--set", "width=16"]
    dry = refused([*changed, "--dry-run"], capsys)
    assert list_tree(spec.parent) == before
    assert dry == refused(changed, capsys) and "--fresh" in dry
    assert main([*changed, "--dry-run", "--fresh"]) == 0
    assert "run-2 (new)" in capsys.readouterr().out


def test_a_missing_record_is_named_before_anything_starts(tmp_path: Path) -> None:
    bad, built = Pipeline(sources.arrays(x=inspected_runs.make_data(40)[0]), seed=0).map(missing), []
    recipe = Recipe(model=lambda params: built.append(params), loss="cross_entropy")
    processes = psutil.Process().children(recursive=True)
    with pytest.raises(Exception, match="no such cat"):
        ensemble.dry_run(inspected_runs.declare(train=bad, recipe=recipe), tmp_path / "run", executor="local")
    assert not built and not list(tmp_path.iterdir())
    assert psutil.Process().children(recursive=True) == processes


def missing(sample: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("no such cat")


def test_wider_members_are_measured_with_a_workers_part_of_the_batch(tmp_path: Path) -> None:
    half_a_core = Resources(cpus_per_worker=0.5)  # one core is enough for both workers
    declared = inspected_runs.declare(members=[Member({"width": 8, "lr": 0.1}, workers=2)], resources=half_a_core)
    assert isinstance(declared, Ensemble)
    (row,) = ensemble.dry_run(declared, tmp_path / "run", executor="local").members
    assert (row["workers"], row["batch_size"]) == (2, 32)
    assert row["cpu_s"] == pytest.approx(2 * row["seconds"] * row["cpus"], rel=0.1)


def test_values_that_are_not_finite_are_counted_and_fields_of_any_form_described(tmp_path: Path) -> None:
    x, label = inspected_runs.make_data()
    x[5, 2] = np.nan
    records = sources.arrays(x=x[:64], label=label[:64])
    pipe = Pipeline(records, seed=0).map(_add_forms, id="forms").map(stages.text("name", most_bytes=8))
    pipe = pipe.map(stages.ragged("steps", most=4, shape=(2,), dtype="float32"))
    recipe = Recipe(model=inspected_runs.build_model, loss=_loss)
    declared = inspected_runs.declare(train=pipe, valid=None, test=None, batch_size=64, recipe=recipe)
    found = ensemble.dry_run(declared, tmp_path / "run", executor="inline")
    fields = {row["name"]: row for row in found.fields}
    assert np.isfinite(fields["x"]["mean"])
    assert fields["name"]["dtype"] == "str" and fields["name"]["mean"] is None
    assert fields["box.corner"]["shape"] == [2] and fields["box.corner"]["max"] == 1.0
    assert fields["steps"]["shape"] == [None]
    json.dumps(found.as_dict(), allow_nan=False)


def test_the_estimate_has_the_evaluation(tmp_path: Path) -> None:
    class SlowInEvaluation(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            until = time.thread_time() + 0.04 * (not self.training)
            while time.thread_time() < until:
                pass
            return super().forward(input)

    def build(params: dict[str, Any]) -> torch.nn.Module:
        print(json.dumps({"build": "what user code prints is no figure"}))
        return SlowInEvaluation(8, 4)

    recipe, members = Recipe(model=build, loss="cross_entropy"), [{"width": 8, "lr": 0.2}]
    declared = inspected_runs.declare(recipe=recipe, members=members, epochs=12)
    found = ensemble.dry_run(declared, tmp_path / "run", executor="inline")
    (row,) = found.members
    assert row["evaluations"] == 12 * 4 + 4 + 7 and row["evaluate_s"] > 0.039
    assert 59 * 0.039 < found.run["cpu_s"] < 2 * 59 * 0.04, "CPU-seconds"


def test_figures_of_a_whole_split_are_measured_in_the_dry_run_too(tmp_path: Path) -> None:
    x, label = inspected_runs.make_data(96)
    pipe = Pipeline(sources.arrays(x=x, label=np.eye(4, dtype=np.int64)[label]), seed=0)
    options = {"loss": "binary_cross_entropy", "task": "multilabel", "split_metrics": ("f1_macro",)}
    recipe = Recipe(model=inspected_runs.build_model, **options)
    declared = inspected_runs.declare(recipe=recipe, train=pipe, valid=pipe, test=None)
    found = ensemble.dry_run(declared, tmp_path / "run", executor="inline")
    assert [row["error"] for row in found.members] == [None] and found.members[0]["evaluate_s"] > 0


RUN = "run dry_spec.py --executor inline --run-dir a"
CALLS = (RUN + " --dry-run", RUN, RUN + " --fresh", "status a", "nodes a", "list .", "usage .", "compare a a-2")
CALLS += (
    "logs a",
    "verify a",
    "stop a",
    "report a",
    "export a out",
    "predict a --split test --out p.parquet",
    "doctor",
)
TYPES = {"text": str, "integer": int, "number": int | float, "boolean": bool, "list": list, "object": dict}
TYPES |= {f"{name}?": kind | None for name, kind in TYPES.items()}


def read_reference(command: str) -> dict[str, tuple[str, str]]:
    """The keys of a command's JSON, as (its type, an asterisk where it is not always there)."""
    keys: dict[str, tuple[str, str]] = {}
    page = Path(inspected_runs.__file__).parents[2] / "docs" / "reference" / "cli.md"
    for section in page.read_text().split("\n### JSON of ")[1:]:
        for row in re.findall(r"^\| (.*`.*) \|$", section, re.MULTILINE):
            *commands, names, types, _ = row.split(" | ")
            found = re.findall(r"(\*?)`([\w.]+)`", names)
            kinds = types.split(", ") if ", " in types else [types] * len(found)
            if f"`{command}`" in (commands[0] if commands else section.partition("\n")[0]):
                keys |= {name: (kind, star) for (star, name), kind in zip(found, kinds, strict=True)}
    return keys


def walk(value: Any, keys: Collection[str], above: str = "") -> Iterator[tuple[str, Any]]:
    for row in value if isinstance(value, list) else [value]:
        for name, held in row.items():
            yield above + name, held
            if any(key.startswith(f"{above}{name}.") for key in keys):
                yield from walk(held, keys, f"{above}{name}.")


@pytest.mark.more
def test_the_reference_has_the_keys_and_types_of_the_json_of_each_command(spec: Path, capsys: Any) -> None:
    for call in CALLS:
        assert main([*call.split(), "--json"]) == 0, call
        keys = read_reference("run --dry-run" if "--dry-run" in call else call.split()[0])
        found = list(walk(json.loads(capsys.readouterr().out), keys))
        missing = {name for name, (_, star) in keys.items() if not star} - {name for name, _ in found}
        wrong = [(name, it) for name, it in found if name not in keys or not isinstance(it, TYPES[keys[name][0]])]
        assert (missing, wrong) == (set(), []), call
