"""Members without a pipeline: a random forest beside two networks, or a search over a small environment.

ensemble run examples/without_data.py
ensemble run examples/without_data.py --set what=pole
"""

import numpy as np
import torch
from torch.nn import functional as F

from ensemble import Ensemble, Member, Search, loguniform
from pipelines import Pipeline, sources


def read_digits(rows):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images[rows] / 16).astype(np.float32), labels[rows].astype(np.int64)


def predict(member, function):
    """Probabilities of the validation samples, their indices, and the accuracy."""
    parts = [(function(b["image"]), b["index"].clone(), b["label"].clone()) for b in member.batches("valid")]
    values, index, label = map(torch.cat, zip(*parts, strict=True))
    return values, index, float((values.argmax(1) == label).double().mean())


def train_forest(member, images, labels):
    import joblib
    from sklearn.ensemble import RandomForestClassifier

    forest = RandomForestClassifier(member.params["trees"], random_state=member.identity.seed).fit(images, labels)
    joblib.dump(forest, member.folder / "forest.joblib")
    values, index, accuracy = predict(member, lambda x: torch.from_numpy(forest.predict_proba(x.numpy())))
    member.report(accuracy=accuracy)
    member.predictions("valid", values, index)


def train_network(member, images, labels):
    hidden = torch.nn.Linear(64, member.params["width"])
    model = torch.nn.Sequential(hidden, torch.nn.ReLU(), torch.nn.Linear(member.params["width"], 10))
    model, optimizer = member.prepare(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    loader = torch.utils.data.DataLoader([*zip(images, labels, strict=True)], batch_size=64, shuffle=True)
    for _ in member.epochs():
        for image, label in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(image), label).backward()
            optimizer.step()
        member.report(accuracy=predict(member, lambda x: model(x).softmax(1).detach())[2])
    values, index, _ = predict(member, lambda x: model(x).softmax(1).detach())  # also after a resume at the end
    member.predictions("valid", values, index)


def train_digits(member):
    train = train_forest if member.params["kind"] == "forest" else train_network
    train(member, *read_digits(slice(0, 1200)))


def balance(weights, rng):
    """The steps, at most 200, until the pole on a cart falls that is pushed to the left or the right."""
    state = rng.uniform(-0.05, 0.05, 4)  # position, speed, angle, angular speed
    for step in range(200):
        force, sine, cosine = 10.0 if weights @ state > 0 else -10.0, np.sin(state[2]), np.cos(state[2])
        push = (force + 0.05 * state[3] ** 2 * sine) / 1.1
        spin = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        state = state + 0.02 * np.array([state[1], push - 0.05 * spin * cosine / 1.1, state[3], spin])
        if abs(state[0]) > 2.4 or abs(state[2]) > 0.21:
            return step
    return 200


def train_pole(member):
    """An evolution strategy: the weights move towards those neighbours that balance the pole longer."""
    sigma, lr, policy = member.params["sigma"], member.params["lr"], torch.nn.Linear(4, 1, bias=False).double()
    member.state("policy", policy)  # checkpoints have it
    weights = policy.weight.detach().numpy()[0]
    for generation in member.epochs():
        rng = np.random.default_rng((member.identity.seed, generation))
        noise = rng.standard_normal((16, 4))
        rewards = np.array([balance(weights + sigma * one, rng) for one in noise])
        weights += lr * (rewards - rewards.mean()) @ noise / (16 * (rewards.std() + 1e-9))
        member.report(reward=float(np.mean([balance(weights, rng) for _ in range(10)])))


def spec(what: str = "digits", trials: int = 8, epochs: int = 10):
    if what == "pole":
        search = Search({"sigma": loguniform(0.01, 1), "lr": loguniform(0.01, 1)}, trials=trials, pruner="median")
        return Ensemble(name=what, recipe=train_pole, search=search, objective="reward", mode="max", epochs=epochs)
    image, label = read_digits(slice(1200, None))
    networks = [{"kind": "network", "width": width} for width in (32, 64)]
    members = [Member({"kind": "forest", "trees": 100}, epochs=1), *networks]
    valid = Pipeline(sources.arrays(image=image, label=label))
    return Ensemble(name=what, recipe=train_digits, members=members, valid=valid, epochs=epochs)
