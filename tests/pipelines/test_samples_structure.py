"""What goes into a batch comes out of it: nested samples, texts, bytes, ragged arrays, however they are read."""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_pipes import Feeder, leaves_nothing, together  # noqa: F401
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from light_stages import jitter

from pipelines import (
    Batch,
    Peers,
    Pipeline,
    PipelineError,
    Ragged,
    attach,
    find_shared_stages,
    sampling,
    sources,
    stages,
)
from pipelines.cache import codec
from pipelines.errors import SampleError
from pipelines.samples.structure import Structure

N, SIZES = 12, (4, 5)


def pipeline_of(samples: list[Any], declared: list[Any], **options: Any) -> Pipeline:
    pipeline = Pipeline(sources.arrays(at=np.arange(len(samples))), id="made", **options)
    looked_up = pipeline.map(lambda sample: samples[int(sample["at"])], id="look up")
    return functools.reduce(Pipeline.map, declared, looked_up)


def equal(one: Any, other: Any) -> bool:
    """Whether two values have the same types, structure and bits."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, Ragged) and type(other) is list:  # as it is expected
        return equal(list(one), other)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def expected(value: Any, kinds: dict[str, str], samples: list[Any], path: tuple[Any, ...] = ()) -> Any:
    """The batch of samples, by the definition: stacked, or listed where a field is declared."""
    if isinstance(value, dict):
        return {name: expected(value[name], kinds, samples, (*path, name)) for name in value}
    if isinstance(value, tuple):
        return tuple(expected(each, kinds, samples, (*path, i)) for i, each in enumerate(value))
    found = samples
    for part in path:
        found = [each[part] for each in found]
    kind = kinds.get(".".join(map(str, path)))
    if kind == "ragged":
        return [torch.from_numpy(each) for each in found]
    if kind is not None:
        return found
    return torch.from_numpy(np.stack([np.asarray(each) for each in found]))


def holds(batch: Any, wanted: Any) -> bool:
    """`equal`, for a batch, whose fields have an order of their own."""
    if isinstance(batch, dict):
        return batch.keys() == wanted.keys() and all(holds(batch[name], wanted[name]) for name in wanted)
    if isinstance(batch, tuple):
        return len(batch) == len(wanted) and all(map(holds, batch, wanted))
    return equal(batch, wanted)


def check_batches(batches: Any, samples: list[Any], kinds: dict[str, str]) -> list[list[int]]:
    order = []
    for batch in batches:
        order.append(batch["index"].tolist())
        fields = {name: value for name, value in batch.items() if name != "index"}
        assert holds(fields, expected(samples[0], kinds, [samples[i] for i in order[-1]])), (fields, order[-1])
    return order


KEYS = st.text("ab.0é ", min_size=0, max_size=3).filter(lambda key: key not in ("index", "_ok"))


@st.composite
def schemas(draw: st.DrawFn, depth: int = 0) -> Any:
    """A dict, a tuple, or (kind, dtype, shape of an entry)."""
    kinds = ["array", "ragged", "text", "binary", "number"] + (["dict", "tuple"] * 2 if depth < 3 else [])
    kind = "dict" if depth == 0 else draw(st.sampled_from(kinds))
    if kind == "dict":
        keys = draw(st.lists(KEYS, min_size=depth == 0, max_size=3, unique=True))
        return {key: draw(schemas(depth + 1)) for key in keys}
    if kind == "tuple":
        return ("tuple", *(draw(schemas(depth + 1)) for _ in range(draw(st.integers(0, 3)))))
    dtype = draw(st.sampled_from(["uint8", "float32", "int64", "bool"]))
    return [kind, dtype, draw(st.lists(st.integers(0, 3), max_size=2))]


def make_sample(schema: Any, rng: np.random.Generator) -> Any:
    if isinstance(schema, dict):
        return {key: make_sample(each, rng) for key, each in schema.items()}
    if isinstance(schema, tuple):
        return tuple(make_sample(each, rng) for each in schema[1:])
    kind, dtype, shape = schema
    if kind == "text":
        return "".join(rng.choice(list("xyé\U0001f600"), rng.integers(0, 5)))
    if kind == "binary":
        return rng.bytes(int(rng.integers(0, 5)))
    if kind == "number":
        return int(rng.integers(0, 100))
    rows = [int(rng.integers(0, 5))] if kind == "ragged" else []
    value = rng.integers(0, 255, (*rows, *shape)).astype(dtype)
    return np.asfortranarray(value) if kind == "ragged" and rng.random() < 0.3 else value


def declarations(schema: Any, path: tuple[Any, ...] = ()) -> dict[str, str]:
    if isinstance(schema, dict):
        return {k: v for key, each in schema.items() for k, v in declarations(each, (*path, key)).items()}
    if isinstance(schema, tuple):
        return {k: v for i, each in enumerate(schema[1:]) for k, v in declarations(each, (*path, i)).items()}
    return {".".join(map(str, path)): schema[0]} if schema[0] in ("ragged", "text", "binary") else {}


def declare(kinds: dict[str, str]) -> list[Any]:
    make: Any = {"ragged": (stages.ragged, 5), "text": (stages.text, 20), "binary": (stages.binary, 5)}
    return [make[kind][0](path, make[kind][1]) for path, kind in kinds.items()]


def is_ambiguous(sample: Any) -> bool:
    """Whether two values, dicts and tuples included, have the same path."""

    def find_paths(value: Any, path: str) -> Iterator[str]:
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else ()
        for name, each in parts:
            yield f"{path}.{name}"
            yield from find_paths(each, f"{path}.{name}")

    found = list(find_paths(sample, ""))
    return len(set(found)) < len(found)


def has_values(schema: Any) -> bool:
    if isinstance(schema, list):
        return True
    return any(map(has_values, schema.values() if isinstance(schema, dict) else schema[1:]))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(schemas(), st.integers(0, 1 << 30))
def test_any_structure_comes_out_of_cache_loader_and_resident_set_or_is_refused(schema: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [make_sample(schema, rng) for _ in range(N)]
    buffers = codec.encode(3, samples[0])
    assert not isinstance(buffers, str)
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(map(bytes, buffers)))
        file.flush()
        assert equal(samples[0], codec.read_record(file.fileno(), 0, 3, 1 << 20))
    if not has_values(schema):
        return
    kinds = declarations(schema)
    pipeline = pipeline_of(samples, declare(kinds))
    if is_ambiguous(samples[0]):
        with contextlib.suppress(PipelineError):
            _ = pipeline.fields
            check_batches(pipeline.loader(5, epochs=1), samples, kinds)
        return
    order = check_batches(pipeline.loader(5, epochs=1), samples, kinds)
    assert sorted(itertools.chain(*order)) == list(range(N))
    still = pipeline_of(samples, declare(kinds), shuffle=False)
    order = check_batches(still.resident().loader(5), samples, kinds)
    assert order == [list(range(at, min(at + 5, N))) for at in range(0, N, 5)]
    if (structure := pipeline.structure) is not None:
        assert Structure.from_record(structure.as_record()) == structure


def detection(k: int) -> dict[str, Any]:
    rng = np.random.default_rng(k)
    boxes = rng.random((k % 4, 4), dtype=np.float32)
    return {
        "image": rng.random((3, 40, 40), dtype=np.float32),
        "target": {"boxes": boxes, "labels": (np.arange(k % 4), k), "name": "é" * (k % 5)},
        "file": bytes(range(k % 6)),
    }


def spoil(value: Any) -> None:
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, torch.Tensor):
            each.fill_(1)
        elif isinstance(each, dict | tuple | list):
            spoil(each)


KINDS = {"target.boxes": "ragged", "target.labels.0": "ragged", "target.name": "text", "file": "binary"}
DECLARED = declare(KINDS)


@pytest.mark.parametrize("how", ["whole", "suffix", "cached"])
def test_shared_batches_of_nested_samples_equal_private_ones(how: str) -> None:
    begun = pipeline_of([detection(k) for k in range(N)], DECLARED, seed=4)
    whole = begun.map(jitter)
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"cache": "memory"} if how == "cached" else {}
        served = begun if how == "suffix" else whole
        feeder = stack.enter_context(Feeder(served, capacity=8, expect=2, **options))
        readers = [attach(feeder.address, whole, 4, range(3), name) for name in ("one", "two")]
        count = 0
        for one, two, own in zip(*readers, whole.loader(4, range(3)), strict=True):
            assert isinstance(one, Batch) and equal(dict(one), dict(own))
            spoil(one)  # others do not see it
            assert equal(dict(two), dict(own))
            kept = own.clone()
            spoil(own)
            assert equal(dict(kept), dict(two)) and type(kept["target"]["boxes"]) is Ragged
            count += 1
        assert count == 9
        assert all(reader.stats()["private_batches"] == 0 for reader in readers)
        assert how != "cached" or feeder.stats()["cache"]["samples"] == N


def test_nodes_send_each_other_nested_samples_at_the_same_sampled_positions(tmp_path: Path) -> None:
    drawn = sampling.balanced(np.arange(N) % 4 == 0, samples=4 * N)
    whole = pipeline_of([detection(k) for k in range(N)], DECLARED, seed=4, sampling=drawn).map(jitter)

    def read(loader: Any) -> list[Any]:
        return [dict(batch.clone()) for batch in loader]

    with contextlib.ExitStack() as stack:
        feeders = []
        for node in range(2):
            options: dict[str, Any] = {"capacity": 16, "expect": 1, "gate_timeout_s": 600.0, "design": "all"}
            peers = Peers(str(tmp_path / "peers"), node, 2, "lo")
            feeders.append(stack.enter_context(Feeder(whole, peers=peers, overwrite_released=True, **options)))
        loaders = [attach(made.address, whole, n, range(2)) for made, n in zip(feeders, SIZES, strict=True)]
        found = together([functools.partial(read, loader) for loader in loaders])
        prepared = [feeder.stats()["prepared"] for feeder in feeders]
    for batches, loader, size in zip(found, loaders, SIZES, strict=True):
        assert equal(batches, read(whole.loader(size, range(2)))) and loader.stats()["private_batches"] == 0
    assert sum(prepared) == 2 * len(whole) and all(prepared), "each has what the other sent"


def test_rows_of_ranks_and_skipped_records() -> None:
    def refuse(sample: dict[str, Any]) -> dict[str, Any]:
        if len(sample["target"]["name"]) == 4:
            raise ValueError("a bad record")
        return sample

    samples = [detection(k) for k in range(N)]
    begun = pipeline_of(samples, DECLARED, seed=4, on_error="skip", max_skipped=1.0).map(refuse)
    with pytest.warns(UserWarning, match="left out"):
        whole, *halves = ([*begun.loader(6, 1, rank=r, world=w)] for r, w in ((0, 1), (0, 2), (1, 2)))
    assert sorted(i for batch in whole for i in batch["index"].tolist()) == [i for i in range(N) if i % 5 != 4]
    for batch, *parts in zip(whole, *halves, strict=True):
        assert [*itertools.chain(*check_batches(parts, samples, KINDS))] == batch["index"].tolist()


def test_a_map_of_one_nested_field_and_selecting_dropping_and_renaming() -> None:
    samples = [detection(k) for k in range(N)]
    pipeline = pipeline_of(samples, DECLARED, shuffle=False)
    changed = pipeline.map(lambda boxes: boxes + 1, field="target.boxes", id="+1")
    batch = next(iter(changed.loader(4, 1)))
    assert equal(batch["target"]["boxes"], [torch.from_numpy(s["target"]["boxes"] + 1) for s in samples[:4]])
    within = pipeline.map(stages.pad("boxes", 3), field="target")  # any stage works inside a field
    batch = next(iter(within.loader(4, 1)))
    assert batch["target"]["boxes"].shape == (4, 3, 4)
    batch = next(iter(pipeline.map(stages.select("image", "target.boxes", "target.name")).loader(4, 1)))
    assert list(batch) == ["image", "target", "index"] and list(batch["target"]) == ["boxes", "name"]
    batch = next(iter(pipeline.map(stages.drop("target.labels.1", "image")).loader(4, 1)))
    assert list(batch) == ["target", "file", "index"] and len(batch["target"]["labels"]) == 1
    batch = next(iter(pipeline.map(stages.rename(target="truth")).loader(4, 1)))
    assert type(batch["truth"]["boxes"]) is Ragged and batch["truth"]["name"] == ["é" * (k % 5) for k in range(4)]
    with pytest.raises(SampleError, match=r"no field 'target\.masks'"):
        next(iter(pipeline.map(lambda x: x, field="target.masks", id="x").loader(4, 1)))
    two = pipeline_of([{"a.b": np.zeros(2), "a": {"b": np.zeros(2)}}], [])
    with pytest.raises(SampleError, match=r"'a\.b' is the name of a field and the path of another"):
        two.map(lambda x: x, field="a.b", id="x").resident()
    flat = pipeline_of([{"a.b": np.zeros(2)}] * 3, [])
    assert flat.structure is None and list(next(iter(flat.loader(3)))) == ["a.b", "index"]


def test_a_shared_part_ends_where_declared_fields_can_be_held() -> None:
    plain = pipeline_of([detection(k) for k in range(N)], [])
    declared = functools.reduce(Pipeline.map, DECLARED, plain)
    cut = find_shared_stages([declared.map(jitter), declared.map(jitter, id="other")])
    assert len(cut.stages) == len(declared.stages)
    ends = [plain.map(jitter, id=name).map(stages.select("image")) for name in ("one", "other")]
    with pytest.warns(UserWarning, match=r"only the stages up to the source .*stages\.text"):
        assert not find_shared_stages(ends).stages
