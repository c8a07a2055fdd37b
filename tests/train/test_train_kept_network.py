"""A model is built again from its checkpoint where `Recipe.model` raises; a file is downloaded once by a node."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from event_dicts import fold, read_events
from execute_members import an_ensemble, loss, momentum
from torch import nn

import ensemble
from ensemble import Recipe
from ensemble.store import RunDir, load_checkpoint, save_checkpoint
from ensemble.train.kept_network import NotKept, pack_network, unpack_network
from ensemble.train.node_checks import NODE_DIRECTORY
from ensemble.train.recipe import build_model
from ensemble.user_code.fingerprint import code_of


class Pretrained(nn.Module):
    """With a buffer that is in no state dict, and tensors of a recurrent network that are views of one another."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.memory = nn.LSTM(features, 4, batch_first=True)
        self.head = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("scale", torch.full((1,), 1.5), persistent=False)
        self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, _ = self.memory((x * self.scale)[:, None, :])
        result: torch.Tensor = self.head(self.dropout(found[:, 0]))
        return result


def pretrained(params: dict[str, Any]) -> nn.Module:
    model = Pretrained(params["features"])
    model.load_state_dict(torch.load(params["file"], weights_only=True))
    return model


def declare(file: Path, epochs: int = 2) -> ensemble.Ensemble:
    if not file.exists():
        torch.manual_seed(0)
        torch.save(Pretrained(4).state_dict(), file)
    recipe = Recipe(model=pretrained, loss=loss, optimizer=momentum)
    members = [{"lr": lr, "features": 4, "file": str(file), "width": 4} for lr in (0.05, 0.1)]
    return an_ensemble(members, recipe=recipe, epochs=epochs, sharing="independent", batch_size=20, seed=3)


def digests(path: Path) -> list[str | None]:
    return [member.weights_sha256 for member in fold(read_events(RunDir(path).events)).members.values()]


@pytest.fixture(scope="module")
def gone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs, and one of four, whose model has read a file that is gone since."""
    folder = tmp_path_factory.mktemp("gone")
    file = folder / "pretrained.pt"
    ensemble.submit(declare(file, epochs=4), folder / "whole", "inline").wait()
    ensemble.submit(declare(file, epochs=2), folder / "run", "inline").wait()
    batch = {"x": torch.linspace(-1, 1, 20).reshape(5, 4)}
    torch.save((batch, ensemble.load(folder / "run")(batch)), folder / "wanted.pt")
    file.unlink()
    return folder


def test_a_run_goes_on_and_is_loaded_when_the_file_that_its_model_reads_is_gone(
    gone: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(gone / "run", tmp_path / "run")
    batch, wanted = torch.load(gone / "wanted.pt")
    with pytest.warns(UserWarning, match="Recipe.model raised FileNotFoundError.* of member-. takes its place"):
        assert torch.equal(ensemble.load(run)(batch), wanted)
    ensemble.resume(run, epochs=4).wait()
    assert digests(run) == digests(gone / "whole")
    assert "the network in the checkpoint takes its place" in RunDir(run).log("member-0").read_text()


@pytest.mark.more
def test_a_process_that_knows_neither_the_models_module_nor_the_file_loads_the_run(gone: Path) -> None:
    code = f"import ensemble; ensemble.load({str(gone / 'run')!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "takes its place" in done.stderr, done.stderr


def fails_in_its_second_epoch(model: Any, batch: Any) -> Any:
    if batch.epoch == 1:
        raise ValueError("the first run ends here")
    return loss(model, batch)


def mistaken(params: dict[str, Any]) -> nn.Module:
    raise ValueError("a mistake of the new model")


def test_other_code_is_not_hidden_by_the_network_that_was_kept(tmp_path: Path) -> None:
    first, second = (declare(tmp_path / "pretrained.pt") for _ in range(2))
    object.__setattr__(first.recipe, "loss", fails_in_its_second_epoch)
    object.__setattr__(second.recipe, "model", mistaken)
    for made in (first, second):
        ensemble.submit(made, tmp_path / "run", "inline", accept_code=True).wait()
    for member in fold(read_events(RunDir(tmp_path / "run").events)).members.values():
        assert member.checkpoint is not None and "a mistake of the new model" in str(member.error)


def test_what_a_pickle_would_change_is_not_kept(tmp_path: Path) -> None:
    made = declare(tmp_path / "pretrained.pt")
    viewed, marked, locked, large = (Pretrained(4) for _ in range(4))
    viewed.copy = viewed.head.weight.detach()[:1]
    marked.head.weight.owner = marked  # type: ignore[assignment]
    locked.lock = threading.Lock()  # type: ignore[assignment]
    large.table = torch.zeros(2**24 + 1)
    for model, why in ((viewed, "a view"), (marked, "owner"), (locked, "be pickled"), (large, "64 MiB")):
        with pytest.raises(NotKept, match=why):
            pack_network(model, made, code_of(made))


def test_plain_notes_at_tensors_are_kept(tmp_path: Path) -> None:
    """Transformers marks each parameter (`_is_hf_initialized`); others say so which learning rate it has."""
    made, model = declare(tmp_path / "pretrained.pt"), Pretrained(4)
    model.head.weight._is_hf_initialized = True  # type: ignore[attr-defined]
    model.scale._optim = {"lr": 0.1, "betas": (0.9, 0.99)}  # type: ignore[union-attr]
    kept = {"network": pack_network(model, made, code_of(made)), "model": model.state_dict()}
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, kept)
    found = unpack_network(RunDir(tmp_path), path, load_checkpoint(path))
    assert found.head.weight._is_hf_initialized is True
    assert found.scale._optim == {"lr": 0.1, "betas": (0.9, 0.99)}


def test_the_first_member_of_a_node_downloads_and_the_others_find_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_DIRECTORY, str(tmp_path))
    downloads, all_at_once = [], threading.Barrier(4)

    def model(params: dict[str, Any]) -> nn.Module:
        file = tmp_path / "weights.pt"
        if not file.exists():
            downloads.append(1)
            with_others(all_at_once)
            torch.save({}, file)
        return nn.Identity()

    member: Any = SimpleNamespace(params={})
    recipe = Recipe(model=model, loss=loss)
    threads = [threading.Thread(target=build_model, args=(recipe, member)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert downloads == [1]


def with_others(barrier: threading.Barrier) -> None:
    """Waits for the other threads, where they come, so that all of them download if nothing holds them."""
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(0.5)
