"""plain.py as an ensemble whose members read one pipeline of graphs. Needs chemprop 2.2.0 (PyPI).

ensemble run examples/ports/chemprop/port.py [--set members=8] [--set epochs=3]
"""

import numpy as np
import torch
from chemprop.data import BatchMolGraph
from chemprop.featurizers import SimpleMoleculeMolGraphFeaturizer
from chemprop.models import MPNN
from plain import BATCH, build, make_molecules
from rdkit import Chem
from sklearn.preprocessing import StandardScaler

from ensemble import Ensemble, Recipe, seeds
from ensemble.integrations.lightning import fit
from pipelines import Pipeline, sources, stages

GRAPH = {"V": 64, "E": 160, "edge_index": 160, "rev_edge_index": 160}  # the most that a molecule has
FEATURIZER = SimpleMoleculeMolGraphFeaturizer()


def featurize(sample):
    graph = FEATURIZER(Chem.MolFromSmiles(str(sample["smiles"])))
    arrays = {"V": graph.V.astype(np.float32), "E": graph.E.astype(np.float32), "edge_index": graph.edge_index.T}
    return {**graph._asdict(), **arrays, "target": sample["target"]}


class Graphs(BatchMolGraph):
    """All graphs of a batch as one: their arrays lie one after the other, and bonds name atoms of the batch."""

    def __init__(self, batch):
        atoms, bonds = batch["V"], batch["E"]
        self.V, first_atoms = atoms.packed()
        self.E, first_bonds = bonds.packed()
        edges = batch["edge_index"].packed()[0] + first_atoms[:-1].repeat_interleave(bonds.lengths)[:, None]
        self.edge_index = edges.T.contiguous()
        backwards = batch["rev_edge_index"].packed()[0]
        self.rev_edge_index = backwards + first_bonds[:-1].repeat_interleave(bonds.lengths)
        self.batch = torch.arange(len(atoms)).repeat_interleave(atoms.lengths)
        self.size = len(atoms)

    def __len__(self):
        return self.size


def make_batch(batch):
    """What the loader of chemprop yields, of the arrays in a batch."""
    target = batch["target"]
    return Graphs(batch), None, None, target, torch.ones(len(target), 1), None, None


class Network(MPNN):
    """Makes its graphs itself: the pipeline hands on arrays, no objects."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return make_batch(batch)


def model(params):
    return build(params["mean"], params["scale"], kind=Network)


def predict(model, batch):
    return model(make_batch(batch)[0])


def train(member):
    fit(member, model(member.params))
    member.predict_all()


def spec(members: int = 8, epochs: int = 3):
    (known, values), held_out = make_molecules()
    scaler = StandardScaler().fit(values)
    train_part, valid_part = (
        Pipeline(
            sources.arrays(smiles=np.array(smiles), target=scaler.transform(target).astype(np.float32)), seed=0
        ).map(featurize)
        for smiles, target in ((known, values), held_out)
    )
    for field, most in GRAPH.items():
        train_part, valid_part = (part.map(stages.ragged(field, most=most)) for part in (train_part, valid_part))
    scale = {"mean": scaler.mean_.tolist(), "scale": scaler.scale_.tolist()}
    return Ensemble(
        name="chemprop",
        recipe=Recipe(
            model=model, train=train, predict=predict, task="regression", target="target", objective="val_loss"
        ),
        members=seeds(members, scale),
        train=train_part,
        valid=valid_part,
        epochs=epochs,
        batch_size=BATCH,
    )
