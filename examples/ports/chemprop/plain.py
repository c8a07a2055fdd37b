"""Message passing on molecules: an ensemble of eight networks that predict two properties, some of them unknown.

The form is that of https://github.com/chemprop/chemprop, examples/training.ipynb (chemprop 2.2.0 on PyPI).

python examples/ports/chemprop/plain.py [--members 8] [--epochs 3]
"""

import argparse
import json
import logging
from concurrent.futures import ProcessPoolExecutor

import lightning
import numpy as np
import torch
from chemprop import data, models, nn
from rdkit import Chem
from rdkit.Chem import Crippen, rdMolDescriptors

BATCH = 64
PARTS = [
    "C",
    "CC",
    "C(=O)N",
    "c1ccc(cc1)",
    "N",
    "O",
    "C(F)",
    "C(C)",
    "c1ccnc(c1)",
    "S(=O)(=O)",
    "C1CCN(CC1)",
    "C(O)",
]


def make_molecules():
    """Chains of groups, and of each molecule two properties, one value in five missing: 1,500; 300 validate."""
    rng = np.random.default_rng(0)
    chains = ("C" + "".join(rng.choice(PARTS, rng.integers(3, 8))) + "C" for _ in range(1500))
    smiles = [chain for chain in chains if Chem.MolFromSmiles(chain)]
    molecules = [Chem.MolFromSmiles(chain) for chain in smiles]
    found = np.array([[Crippen.MolLogP(m), rdMolDescriptors.CalcTPSA(m)] for m in molecules], np.float32)
    found[rng.random(found.shape) < 0.2] = np.nan
    return (smiles[:-300], found[:-300]), (smiles[-300:], found[-300:])


def build(mean, scale, kind=models.MPNN):
    output = nn.UnscaleTransform(mean, scale)
    head = nn.RegressionFFN(n_tasks=2, input_dim=200, output_transform=output)
    return kind(nn.BondMessagePassing(d_h=200), nn.MeanAggregation(), head, metrics=[nn.metrics.RMSE()])


def train(seed, epochs):
    torch.set_num_threads(1)
    lightning.seed_everything(seed, verbose=False)
    known, held_out = (
        data.MoleculeDataset([data.MoleculeDatapoint.from_smi(s, y) for s, y in zip(*part, strict=True)])
        for part in DATA
    )
    scaler = known.normalize_targets()
    held_out.normalize_targets(scaler)
    batches = data.build_dataloader(known, batch_size=BATCH, seed=seed)
    validation = data.build_dataloader(held_out, batch_size=BATCH, shuffle=False)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(build(scaler.mean_, scaler.scale_), batches, validation)
    return float(trainer.callback_metrics["val_loss"])


def main():
    global DATA
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    DATA = make_molecules()  # before the processes are forked
    with ProcessPoolExecutor(2) as pool:
        print(json.dumps(list(pool.map(train, range(options.members), [options.epochs] * options.members))))


if __name__ == "__main__":
    main()
