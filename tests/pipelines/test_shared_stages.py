"""Members whose pipelines differ at the end share what is common, and see what they would see alone."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
from core_pipes import Child, Feeder, Job, N, alone, data, leaves_nothing, noise, pipe, shared, together  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples

from pipelines import Pipeline, PipelineError, SampleError, attach, find_shared_stages, sources, stages
from pipelines.samples.memory_order import copy_in_layout, layout_of, normalize_layout

pytestmark = pytest.mark.filterwarnings("ignore:left out")


def test_members_with_different_ends_share_the_beginning() -> None:
    crowd: list[dict[str, Any]] = [{"batch_size": 16}, {"batch_size": 10, "start_step": 4}]
    crowd += [{"batch_size": 7, "rank": rank, "world": 2} for rank in range(2)]
    crowd += [{"batch_size": 25, "rank": rank, "world": 3, "drop_last": True} for rank in range(3)]
    jobs = [
        Job(kind=kind, epochs=(0, 2), **options)
        for kind in ("ended skip", "ended skip numpy")
        for options in crowd
    ]
    jobs = [dataclasses.replace(job, name=f"{job.kind}{job.batch_size}-{job.start_step}") for job in jobs]
    jobs.append(Job(kind="begun skip", batch_size=8, epochs=(0, 2), name="as it is"))
    # torch's generator is the process's own: who draws from it has a process to itself.
    apart = Job(kind="ended skip torch", batch_size=7, name="torch")
    expected = [alone(dataclasses.replace(job, name="")) for job in [*jobs, apart]]
    names = len({job.name for job in jobs}) + 1
    with Feeder(pipe("begun skip"), workers=3, capacity=64, expect=names) as feeder:
        child = Child(feeder.address, apart)
        results = together([partial(shared, job, feeder.address) for job in jobs])
        results += child.results()
        stats = feeder.stats()
    assert [records for records, _ in results] == expected
    assert all(counts["private_batches"] == 0 for _, counts in results)
    used = [counts["prepare_cpu_s"] for _, counts in results]
    assert len(used) == len(jobs) + 1 and all(used[:-2]) and used[-1] > 0, "all but the one that reads it as it is"
    assert stats["prepared"] == N, "each sample is begun once for all, in both epochs"


def test_a_member_goes_on_alone_with_its_own_end_when_the_feeder_dies() -> None:
    job = Job(kind="ended torch", epochs=(0, 3))
    feeder = Feeder(pipe("begun"), capacity=16)
    with feeder:
        loader = job.attach(feeder.address)
        batches = iter(loader)
        seen = [next(batches)["index"].tolist() for _ in range(5)]
        feeder.close()
        seen += [batch["index"].tolist() for batch in batches]
    assert seen == [record[3] for record in alone(job)]
    assert loader.stats()["shared_batches"] >= 5 and loader.stats()["private_batches"] > 0


def bad_end(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] == 5:
        raise ValueError("no such augmentation")
    return sample


def test_an_end_that_fails_names_sample_and_file_and_harms_nobody_else() -> None:
    begun = Pipeline(data(), seed=3)
    with Feeder(begun, expect=2, capacity=16) as feeder:

        def fails() -> str:
            with pytest.raises(SampleError) as caught:
                list(attach(feeder.address, begun.map(bad_end), 8, range(1), name="bad"))
            return str(caught.value)

        def reads() -> int:
            return len(list(attach(feeder.address, begun.map(noise), 8, range(2), name="good")))

        said, count = together([fails, reads])
    assert said == "sample 5 (arrays(image, mask, flag, label):row 5): bad_end: no such augmentation"
    assert count == 2 * 8


def unlike(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "image": sample["image"][: 1 + (sample["label"] == 9)]}


def alike(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "image": sample["image"][:1]}


def as_number(sample: dict[str, Any]) -> dict[str, Any]:
    label = sample["label"]
    return {**sample, "label": int(label), "share": float(label) / 3, "odd": bool(label % 2)}


def of_numbers(sample: dict[str, Any]) -> dict[str, Any]:
    assert [type(sample[name]) for name in ("label", "share", "odd")] == [int, float, bool]
    # What numpy makes of it depends on whose number it is (NEP 50).
    return {**sample, "image": sample["image"] * sample["share"]}


@pytest.mark.parametrize(("begins", "ends"), [(unlike, alike), (as_number, of_numbers)])
def test_a_sample_that_the_ring_cannot_hold_and_pythons_numbers_are_as_alone(begins: Any, ends: Any) -> None:
    whole = Pipeline(data(), seed=3).map(begins).map(ends)
    expected = [batch["image"].numpy().tobytes() for batch in whole.loader(8)]
    with Feeder(whole.take_stages(1, is_cut=True), capacity=16) as feeder:
        loader = attach(feeder.address, whole, 8, range(1))
        assert [batch["image"].numpy().tobytes() for batch in loader] == expected
        assert loader.stats()["private_batches"] == 0 and feeder.stats()["skipped"] == 0


def test_a_beginning_that_no_ring_can_hand_on_leaves_its_members_to_work_alone() -> None:
    torch = pytest.importorskip("torch")
    begun = pipe("plain").map(lambda sample: {**sample, "label": torch.tensor(sample["label"])}, id="tensor")
    with Feeder(begun) as feeder:
        with pytest.warns(UserWarning, match=r"working alone: .*'label' is torch.int64, neither a numpy"):
            loader = attach(feeder.address, begun.map(noise), 8, range(1))
        assert len(list(loader)) == 8 and loader.stats()["shared_batches"] == 0


def test_the_shared_part_is_the_longest_one() -> None:
    base = pipe("plain").map(bad_end)
    ends = [base.map(noise).map(alike), base.map(noise).map(noise), base.map(noise).map(unlike)]
    common = find_shared_stages(ends)
    assert common.stages == ends[0].stages[:2] and common.is_cut
    assert find_shared_stages(ends[:1]) is ends[0]
    assert not find_shared_stages([base, *ends]).is_cut, "somebody reads it as it is"
    rebuilt = pipe("plain").map(bad_end).map(noise).map(unlike)
    assert find_shared_stages([ends[1], rebuilt]).parts() == base.map(noise).parts()


def jpegs(sizes: list[int]) -> Any:
    import simplejpeg

    return sources.arrays(image=[bytes(simplejpeg.encode_jpeg(np.zeros((40, w, 3), np.uint8))) for w in sizes])


def test_a_cut_is_made_only_where_a_ring_can_hold_the_samples() -> None:
    decoded = Pipeline(jpegs([48] * 6)).map(stages.decode_jpeg("image"))
    flipped = decoded.map(stages.random_flip("image"))
    assert len(find_shared_stages([flipped, decoded.map(stages.scale("image"))]).stages) == 1
    other = Pipeline(jpegs([48] * 6)).map(stages.decode_jpeg("image", mode="GRAY"))
    with pytest.raises(PipelineError, match=r"cannot share.*after the source the field 'image' is bytes"):
        find_shared_stages([decoded, other])
    unlike = Pipeline(jpegs([48, 48, 48, 48, 48, 64])).map(stages.decode_jpeg("image"))
    ends = [unlike.map(stages.resize("image", size=s)).map(noise) for s in (32, 16)]
    with pytest.raises(PipelineError, match=r"'image' differs between samples: uint8\[3, 40, 48\], uint8"):
        find_shared_stages(ends)


def test_fields_that_share_memory_are_not_parted_by_a_cut() -> None:
    """A stage that writes into one of them would change both, here but not there."""
    grown = pipe("plain").map(lambda sample: {**sample, "twin": sample["image"][:1]}, id="twin")
    with pytest.warns(UserWarning, match="'image' and 'twin' lie in the same memory"):
        assert find_shared_stages([grown.map(noise), grown.map(alike)]).stages == ()


@st.composite
def views(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Views of all kinds: transposed, cut out, with steps, backwards, broadcast, of length 0 and 1."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    array = np.arange(np.prod(shape), dtype=draw(st.sampled_from(["uint8", "float32", "complex64"])))
    array = array.reshape(shape).transpose(draw(st.permutations(range(len(shape)))))
    steps = st.builds(slice, st.integers(0, 2), st.integers(1, 4), st.integers(1, 2)) | st.just(slice(None))
    array = array[(*(draw(steps | st.just(slice(None, None, -1))) for _ in shape), ...)]
    if draw(st.booleans()):
        array = np.broadcast_to(array, (2, *array.shape)).transpose(draw(st.permutations(range(array.ndim + 1))))
    return array


@examples(100)
@given(views())
def test_a_settled_array_is_dense_writable_and_of_the_form_that_was_foretold(view: np.ndarray[Any, Any]) -> None:
    array = normalize_layout(view)
    assert array.shape == view.shape and (array == view).all() and array.flags.behaved
    assert array.transpose(layout_of(view)).flags.c_contiguous
    assert layout_of(array) == layout_of(view) and normalize_layout(array) is array
    again = copy_in_layout(np.ascontiguousarray(view).reshape(view.shape), layout_of(view))
    steps = [[s for s, n in zip(a.strides, a.shape, strict=True) if n > 1] for a in (again, array) if a.size]
    assert (again == view).all() and steps == steps[::-1]


@pytest.mark.parametrize("field", ["x", None])
def test_a_stage_gets_settled_arrays_and_whatever_else_as_it_is(field: str | None) -> None:
    def views_of(value: Any) -> Any:
        x = value if field else value["x"]
        x = x.transpose(2, 0, 1)[:, 1:]
        return x if field else {**value, "x": x}

    def keep(sample: dict[str, Any]) -> dict[str, Any]:
        calls.append(sample)
        return sample

    calls: list[Any] = []
    source = sources.arrays(x=np.arange(120.0).reshape(2, 5, 4, 3), text=["a", "b"])
    pipeline = Pipeline(source).map(views_of, field=field).map(keep).map(lambda s: {"x": s["x"]})
    batch = next(iter(pipeline.loader(2)))
    x = calls[-1]["x"]
    assert x.strides == (8, 96, 24) and x.base.flags.owndata and calls[-1]["text"] in "ab"
    assert batch["x"].shape == (2, 3, 4, 4)


def test_what_cannot_be_written_to_is_copied_before_the_next_stage() -> None:
    def frozen(value: Any) -> Any:
        return np.frombuffer(value.tobytes(), value.dtype)

    def add(value: Any) -> Any:
        value += 1
        return value

    source = sources.arrays(x=np.zeros((4, 3)))
    batch = next(iter(Pipeline(source).map(frozen, field="x").map(add, field="x").loader(4)))
    assert (batch["x"] == 1).all()
