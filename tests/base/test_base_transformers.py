"""PEFT's LoRA on a Transformers model that all members share, as its documentation shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.finished_runs import finished_hashes, of_kind
from torch import nn

import ensemble
from ensemble import Ensemble, Recipe
from ensemble.store import RunDir, load_checkpoint, read_state
from pipelines import Pipeline, sources

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
peft = pytest.importorskip("peft", reason="PEFT is not installed")

WORDS, LENGTH = 50, 12


class Classifier(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.out = encoder, nn.Linear(32, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(input_ids=tokens).last_hidden_state[:, 0])


def with_lora(params: dict[str, Any], base: nn.Module) -> nn.Module:
    options = {"r": params["rank"], "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["query", "value"]}
    return Classifier(peft.get_peft_model(base, peft.LoraConfig(**options)))


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch["tokens"]), batch["label"], reduction="none")


def texts(count: int, seed: int) -> Pipeline:
    """Sequences of tokens, and whether the first is of the upper half: int64 [12]."""
    tokens = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed)).numpy()
    return Pipeline(sources.arrays(tokens=tokens, label=(tokens[:, 0] >= WORDS // 2).astype("int64")), seed=0)


def test_lora_of_several_ranks_on_one_encoder_from_a_folder(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "encoder")
    members = [{"rank": rank, "lr": lr} for rank, lr in ((2, 0.1), (4, 0.2))]
    recipe = Recipe(model=with_lora, base=str(tmp_path / "encoder"), loss=loss, task="classification")
    data = {"train": texts(96, 1), "valid": texts(32, 2), "combine": "average", "devices": "cpu"}
    declared = Ensemble(name="lora", recipe=recipe, members=members, epochs=2, batch_size=16, **data)
    ensemble.submit(declared, tmp_path / "run", executor="local").wait()
    assert len(finished_hashes(tmp_path / "run")) == 2
    (made,) = of_kind(tmp_path / "run", "base_made")
    assert made["source"] == str(tmp_path / "encoder")
    run, state = RunDir(tmp_path / "run"), read_state(tmp_path / "run/events.jsonl")
    for member, rank in (("member-0", 2), ("member-1", 4)):
        trained = load_checkpoint(run.valid_checkpoint(state.members[member]))["model"]
        ranks = {tensor.shape[0] for name, tensor in trained.items() if "lora_A" in name}
        others = [name for name in trained if "lora" not in name]
        assert ranks == {rank} and others == ["out.weight", "out.bias"]
    model = ensemble.load(run)
    tokens = torch.zeros(3, LENGTH, dtype=torch.int64)
    assert model({"tokens": tokens}).shape == (3, 2)
    embeddings = {one.encoder.get_input_embeddings().weight.data_ptr() for one in model.members.values()}
    assert len(embeddings) == 1
