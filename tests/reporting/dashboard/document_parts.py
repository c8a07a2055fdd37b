"""Parts of the documents that `documents` makes: nodes, streams, cost, quality."""

from __future__ import annotations

import math
import random
from typing import Any

from ensemble.reporting import model_figures

COST_COLUMNS = (
    "cpu_s", "energy_j", "origin", "full_cpu_s", "full_energy_j", "full_origin", "idle_j", "mean_w", "peak_w",
    "gpu_s",
)  # fmt: skip

Document = dict[str, Any]


def make_combined(ids: list[str], rows: dict[str, Document]) -> Document:
    best = rows[ids[0]]["metric"]
    return {
        "method": "greedy",
        "members": ids,
        "weights": {name: 1 / len(ids) for name in ids},
        "split": "test",
        "metrics": {
            "ensemble": {"accuracy": best + 0.01, "nll": 0.358, "ece": 0.052},
            "best": {"accuracy": best - 0.012, "nll": 0.436, "ece": 0.033},
            "mean": {"accuracy": best - 0.03, "nll": 0.45, "ece": 0.04},
        },
        "best_member": ids[0],
        "note": None,
        "temperature": 0.8,
    }


def make_node(rng: random.Random, name: str, gpus: int) -> Document:
    return {
        "name": name,
        "cpus": 32.0,
        "memory_gb": 256.0,
        "gpus": [
            {
                "id": f"GPU-{name}-{i}",
                "memory_gb": 80.0,
                "free_gb": 40 + 30 * rng.random(),
                "share": 1.0,
                "parent": None,
                "use": rng.random(),
                "watts": 180 + 90 * rng.random(),
                "quarantined": None,
            }
            for i in range(gpus)
        ],
        "watts": 345.0,
        "watts_origin": "measured",
        "power_source": "RAPL and NVML",
        "cpu_use": 18.4,
        "note": None,
        "gone": False,
    }


def make_stream(node: str, cohort: int, members: int) -> Document:
    return {
        "node": node,
        "cohort": cohort,
        "workers": 4,
        "capacity": 4096,
        "ring_bytes": 1118208,
        "prepared": 6468,
        "consumed": 51744,
        "skipped": 0,
        "restarts": 0,
        "prepared_per_s": 2600.0,
        "consumed_per_s": 20800.0,
        "levels": {"ring": 0.9, "workers": 0.47, "waiting": 0.61},
        "members": members // 2,
        "design": "node",
        "nodes": [node],
        "sent_bytes": 0,
        "cache": None,
        "slow": None,
        "limit": None,
        "lost": None,
    }


def make_cost(rng: random.Random, rows: dict[str, Document]) -> Document:
    costs, by_role = {}, {}
    for name, row in rows.items():
        cpu_s = 4.0 * len(row["metrics"]) * (1 + rng.random())
        energy_j = 12 * cpu_s
        costs[name] = [
            cpu_s,
            energy_j,
            "measured",
            cpu_s * 1.3,
            energy_j * 1.5,
            "estimated",
            energy_j * 0.3,
            22.0,
            40.0,
            cpu_s,
        ]
        by_role[name] = {"train": [cpu_s, energy_j]}
    return {
        "members": {"columns": COST_COLUMNS, "rows": costs},
        "roles": [
            make_role("train", "training", 3300.0, 150000.0, 190000.0),
            make_role("prepare", "preparing samples", 1300.0, 40000.0, None),
        ],
        "lines": [["Energy", "201 kJ (measured)"]],
        "by_member_role": {**by_role, "": {"prepare": [1300.0, 40000.0]}},
    }


def make_role(role: str, word: str, cpu_s: float, energy_j: float, full_j: float | None) -> Document:
    return {
        "role": role,
        "word": word,
        "cpu_s": cpu_s,
        "energy_j": energy_j,
        "origin": "measured",
        "full_j": full_j,
    }


def make_quality(rng: random.Random, ids: list[str]) -> Document:
    bins = [
        [0.1 * i + 0.05, min(1.0, 0.1 * i + 0.05 + rng.gauss(0, 0.04)), rng.randint(3, 90)] for i in range(2, 10)
    ]
    scores = {
        name: {"accuracy": 0.9 - 0.01 * i, "nll": 0.35 + 0.02 * i, "ece": 0.04, "brier": 0.2 + 0.01 * i}
        for i, name in enumerate(ids)
    }
    matrix = [[0.0 if i == j else 0.1 + 0.01 * abs(i - j) for j in range(len(ids))] for i in range(len(ids))]
    return {
        "task": "classification",
        "figures": list_figures("accuracy", "nll", "ece", "brier"),
        "criterion": "nll",
        "intervals": None,
        "noise": None,
        "plots": [],
        "tables": [],
        "split": "test",
        "rows": 359,
        "members": scores,
        "combined": {"accuracy": 0.915, "nll": 0.31, "ece": 0.03, "brier": 0.17},
        "combination": {
            "method": "greedy",
            "members": ids[:3],
            "weights": dict(zip(ids, (0.5, 0.3, 0.2), strict=False)),
            "temperature": 0.8,
            "note": None,
            "reason": None,
            "so_far": False,
        },
        "left_out": 0,
        "best": ids[0],
        "curves": {"best": bins, "combined": bins},
        "missing": None,
        "gain": [
            {"members": k + 1, "added": name, "value": nll, "nll": nll, "accuracy": 0.9 + 0.004 * k, "ece": 0.04}
            for k, name in enumerate(ids)
            for nll in [0.35 - 0.03 * math.sqrt(k)]
        ],
        "disagreement": {"members": ids, "matrix": matrix, "unit": "share", "reading": "Share of samples."},
    }


def list_figures(*names: str) -> list[Document]:
    """What a document says of figures."""
    return [figure.as_document() for figure in model_figures.list_figures(names)]
