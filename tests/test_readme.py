"""The README does what it says: its code is run as printed."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ensemble
from pipelines import Feeder, attach

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
SPEC, API, WEIGHTS, WORDS, SEARCH, COST, SURE, LOGGED, FEED, ATTACH, ENDS, PEERS = BLOCKS


def jpeg(side: int, seed: int) -> bytes:
    import simplejpeg

    return bytes(simplejpeg.encode_jpeg(np.random.default_rng(seed).integers(0, 255, (side, side, 3), np.uint8)))


@pytest.fixture
def spec_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The spec of the README, and a folder `cifar10` with a little data."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar10").mkdir()
    images = [{"bytes": jpeg(32, seed), "path": None} for seed in range(90)]
    for split, rows in (("train", 90), ("test", 20)):
        table = pa.table({"image": images[:rows], "label": [i % 10 for i in range(rows)]})
        pq.write_table(table, f"cifar10/{split}.parquet")
    path = tmp_path / "first.py"
    path.write_text(SPEC)
    return path


def test_the_spec_runs_as_a_file_and_from_python(spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "ensemble.cli", "run", str(spec_file), "--executor", "local"]
    done = subprocess.run([*command, "--set", "data=cifar10"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "combined" in done.stdout and "each was used 4.00 times" in done.stdout

    monkeypatch.syspath_prepend(str(spec_file.parent))
    names: dict[str, Any] = {}
    exec(compile(SPEC, "README", "exec"), names)
    fresh = API.replace("runs/first", "runs/second").replace('executor="ray"', 'executor="local"')
    assert fresh != API
    exec(compile(fresh, "README", "exec"), names)
    states = {row["member"]: row["state"] for row in names["result"].members}
    assert states.pop("member-3") == "cancelled"
    assert set(states.values()) == {"finished"}
    probabilities = names["model"]({"image": __import__("torch").zeros(2, 3, 32, 32)})
    assert probabilities.shape == (2, 10)
    assert isinstance(names["model"], __import__("torch").nn.Module)

    exec(compile(SURE.replace("runs/first", "runs/second"), "README", "exec"), names)
    outputs = names["unsure"]({"image": __import__("torch").zeros(2, 3, 32, 32)})
    assert outputs["epistemic"].shape == (2,)
    assert names["sets"].predict(outputs["values"].numpy()).shape == (2, 10)


def test_members_weigh_their_samples_as_said(spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(spec_file.parent))
    names: dict[str, Any] = {}
    exec(compile(SPEC, "README", "exec"), names)
    exec(compile(WEIGHTS, "README", "exec"), names)
    assert [names["committee"].identify(i).weights["held_out"] for i in range(4)] == [0, 1, 2, 3]
    narrow = replace(names["bagging"], members=names["bagging"].members[:2], epochs=1)
    result = ensemble.submit(narrow, run_dir="runs/bagging", executor="inline").wait()
    assert [row["state"] for row in result.members] == ["finished", "finished"]


def test_a_run_is_logged_as_said(spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(spec_file.parent))
    names: dict[str, Any] = {}
    for block in (SPEC, LOGGED):
        exec(compile(block, "README", "exec"), names)
    short = replace(names["logged"], members=names["logged"].members[:1], epochs=1)
    ensemble.submit(short, run_dir="runs/logged", executor="inline").wait()
    for written in ("tensorboard/member-0/events.*", "mlflow/mlflow.db", "wandb/wandb/offline-run-*-member-0"):
        assert len(list(Path("runs/logged").glob(written))) == 1, written
    assert Path("runs/logged/metrics.csv").is_file() and Path("runs/logged/results.json").is_file()


def test_members_train_as_their_words_say(spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(spec_file.parent))
    names: dict[str, Any] = {}
    for block in (SPEC, WEIGHTS, WORDS):
        exec(compile(block, "README", "exec"), names)
    members = [replace(member, epochs=1) for member in names["trials"].members[-2:]]
    trials = replace(names["trials"], members=members, batch_size=32, name="words")
    result = ensemble.submit(trials, run_dir="runs/words", executor="local").wait()
    assert [row["state"] for row in result.members] == ["finished", "finished"]


def test_the_searches_are_what_they_say(spec_file: Path) -> None:
    names: dict[str, Any] = {}
    for block in (SPEC, WEIGHTS, SEARCH):
        exec(compile(block, "README", "exec"), names)
    assert names["searched"].search.pruner_options == {
        "name": "hyperband",
        "min_resource": 1,
        "reduction_factor": 3,
    }
    assert (names["diverse"].search.gain, names["diverse"].search.pruner_options["epochs"]) == ("nll", 3)


def test_emissions_and_price_are_computed_where_they_are_given(
    spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(spec_file.parent))
    names: dict[str, Any] = {}
    for block in (SPEC, WEIGHTS, COST):
        exec(compile(block, "README", "exec"), names)
    costed = replace(names["costed"], members=names["costed"].members[:1], epochs=1)
    ledger = ensemble.submit(costed, run_dir="runs/costed", executor="local").wait().ledger
    assert ledger is not None and Path("runs/costed/ledger.csv").is_file()
    _, electricity, emissions, price = ledger["impact"]["quantities"]
    assert emissions["total"] == pytest.approx(electricity["total"] * 1.3 * 380)
    assert (price["total"], price["unit"]) == (pytest.approx(electricity["total"] * 1.3 * 0.22), "EUR")


def test_the_pipeline_runs_alone_and_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for seed in range(3):
            (tmp_path / "photos" / label / f"{seed}.jpg").write_bytes(jpeg(64, seed))

    def my_function(sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    names: dict[str, Any] = {"my_function": my_function}
    exec(compile(FEED, "README", "exec"), names)
    assert names["batch"]["image"].shape == (6, 3, 224, 224)
    with Feeder(names["pipe"]) as feeder:
        names["address"] = feeder.address
        exec(compile(ATTACH, "README", "exec"), names)
    assert names["loader"].stats()["shared_batches"] == 3

    def train(address: str, ends: list[Any]) -> None:
        for number, end in enumerate(ends):
            loaders.append(attach(address, end, batch_size=6, epochs=range(1), name=f"member-{number}"))
        threads = [threading.Thread(target=list, args=(loader,)) for loader in loaders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    loaders: list[Any] = []
    names["train"] = train
    exec(compile(ENDS, "README", "exec"), names)
    assert [loader.stats()["shared_batches"] for loader in loaders] == [1, 1]

    both = PEERS.replace('"eth0"', '"lo"').replace("nodes=4", "nodes=2").replace("expect=8", "expect=0")
    first, second = both.replace("feeder.close()", ""), both.replace("node=0", "node=1")
    exec(compile(first, "README", "exec"), names)
    with names["feeder"] as feeder:
        exec(compile(second.replace("feeder.close()", ""), "README", "exec"), names)
        with names["feeder"]:
            names["address"] = feeder.address
            exec(compile(ATTACH, "README", "exec"), names)
            assert feeder.stats()["group"]["nodes"] == [0, 1]
    assert names["loader"].stats()["shared_batches"] == 3


def test_every_command_of_the_readme_exists() -> None:
    text = (ROOT / "README.md").read_text()
    words = "demo|run|status|logs|stop|resume|report|bench|doctor|submit|dashboard|export|predict"
    named = set(re.findall(rf"\bensemble ({words})\b", text))
    said = subprocess.run([sys.executable, "-m", "ensemble.cli", "--help"], capture_output=True, text=True).stdout
    assert named and named <= set(re.findall(r"^    (\w+)", said, re.MULTILINE))
    assert ensemble.__all__
