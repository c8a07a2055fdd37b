"""One of four processes: `python members_child.py NUMBER FOLDER`; all sum gradients, then two by two train."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import train_child as cases
from torch import nn

from ensemble.comm.gradients import GradientExchange
from ensemble.comm.torch_dist import connect
from ensemble.spec import Recipe
from ensemble.store import weights_sha256
from ensemble.train import Inbox, work

SCALE = 2.0**16
#: Member -> its loss; that of the first overflows at sample 7, which one of its two workers has.
LOSSES = {"overflowing": cases.overflowing, "sound": cases.loss}


def summed(rank: int, folder: Path) -> dict[str, list[float]]:
    """2048 + 1 + 1 + 1, and a sum that passes through what fp16 cannot hold, as gradients of fp16 and of fp32."""
    comm = connect((folder / "four").as_uri(), rank=rank, world=4, device=torch.device("cpu"), interface="lo")
    weights = {"fp16": nn.Parameter(torch.zeros(2).half()), "fp32": nn.Parameter(torch.zeros(2))}
    exchange = GradientExchange(list(weights.values()), comm)
    own = [[2048.0, 40000.0], [1.0, 40000.0], [1.0, -40000.0], [1.0, -39968.0]][rank]
    for weight in weights.values():
        weight.grad = torch.tensor(own).half().to(weight.dtype)
    exchange.finish()
    comm.close()
    return {name: weight.grad.tolist() for name, weight in weights.items() if weight.grad is not None}


def declare(name: str, workers: int, model: Any = cases.plain) -> Any:
    """A member with a static loss scale in fp16."""
    return cases.declare(Recipe(model=model, loss=LOSSES[name]), workers, precision="fp16", loss_scale=SCALE)


def train_member(name: str, rank: int, folder: Path) -> dict[str, Any]:
    """What this rank did and said, and the weights that it ends with."""
    models: list[nn.Module] = []

    def keeping(params: dict[str, Any]) -> nn.Module:
        models.append(cases.plain(params))
        return models[0]

    ensemble = declare(name, 2, keeping)
    events: list[dict[str, Any]] = []
    rendezvous = (folder / f"meet-{name}").as_uri()
    job = cases.make_job(folder / name, ensemble, rank=rank, rendezvous=rendezvous)
    outcome = work(job, ensemble, events.append, Inbox())
    return {"outcome": outcome, "events": events, "weights": weights_sha256(models[0].state_dict())}


def main() -> None:
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    said: dict[str, Any] = {"sum": summed(number, folder)}
    name = list(LOSSES)[number // 2]
    said[name] = train_member(name, number % 2, folder)
    (folder / f"{number}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
