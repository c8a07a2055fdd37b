"""Who may read what of a running stream: gates, boundaries, mistakes, garbage; and what it costs."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import socket
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import core_pipes as pipes
import numpy as np
import pytest
from core_pipes import Feeder, Job, N, leaves_nothing, pipe  # noqa: F401

from pipelines import Pipeline, PipelineError, attach, sources
from pipelines.fingerprint import SCHEME
from pipelines.ipc import messages
from pipelines.order.stream import min_capacity
from pipelines.shm import words


def test_the_gate_opens_when_every_rank_of_every_expected_member_is_there_or_after_its_time_limit() -> None:
    jobs = [Job(name="wide", world=2), Job(name="narrow", batch_size=5), Job(name="wide", rank=1, world=2)]
    with Feeder(pipe("numpy"), capacity=16, expect=2) as feeder:
        jobs[2].attach(feeder.address).close()  # has been there, but is no more
        loaders = [job.attach(feeder.address) for job in jobs[:2]]
        time.sleep(0.2)
        assert feeder.stats()["prepared"] == 0
        loaders.append(jobs[2].attach(feeder.address))
        results = pipes.together([partial(pipes.read, *pair) for pair in zip(loaders, jobs, strict=True)])
        assert results == [pipes.alone(job) for job in jobs]
        assert all(loader.stats()["private_batches"] == 0 for loader in loaders)
    with Feeder(pipe("numpy"), capacity=16, expect=5, gate_timeout_s=0.4) as feeder:
        records, counts = pipes.shared(Job(), feeder.address)
    assert records == pipes.alone(Job()) and counts["private_batches"] == 0


def test_a_newcomer_joins_at_the_next_boundary_and_says_which_it_is() -> None:
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        old = iter(Job(epochs=(2, 9), name="old").attach(feeder.address))
        for _ in range(3):
            next(old)
        ranks = [attach(feeder.address, pipe("numpy"), 6, 2, name="new", rank=rank, world=2) for rank in range(2)]
        jobs = [Job(batch_size=6, epochs=(3, 5), rank=rank, world=2) for rank in range(2)]
        assert [loader.reading.epochs for loader in ranks] == [range(3, 5)] * 2
        reading = [partial(pipes.read, *pair) for pair in zip(ranks, jobs, strict=True)]
        olds, *results = pipes.together([lambda: [*map(pipes.record, old)], *reading])
        assert results == [pipes.alone(job) for job in jobs] and olds == pipes.alone(Job(epochs=(2, 9)))[3:]
        assert all(loader.stats()["private_batches"] == 0 for loader in ranks)


def test_a_late_rank_reads_the_epochs_of_its_member_though_the_stream_has_gone_past() -> None:
    job = Job(epochs=(0, 3), batch_size=8, world=2)
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        member = partial(attach, feeder.address, pipe("numpy"), 8, 3, name="member", world=2)
        others = iter(Job(epochs=(1, 40), name="goes on").attach(feeder.address))
        early = member(rank=0)
        start = early.reading.epochs.start
        pipes.together([partial(pipes.read, early, job), lambda: [next(others) for _ in range(8 * (start + 3))]])
        late = member(rank=1)
        assert late.reading.epochs == early.reading.epochs and not late.shared
        others.close()
        assert pipes.read(late, job) == pipes.alone(Job(epochs=(start, start + 3), batch_size=8, world=2, rank=1))


def test_a_gate_that_waits_for_one_who_will_not_come_can_be_told() -> None:
    with Feeder(pipe("numpy"), capacity=16, expect=2) as feeder:
        waits: list[int] = []

        def expect_one() -> None:
            if not waits:
                waits.append(feeder.stats()["prepared"])
                feeder.set_expect(1)

        loader = attach(feeder.address, pipe("numpy"), 8, range(1), on_wait=expect_one)
        assert sum(len(batch["index"]) for batch in loader) == N
        assert waits == [0] and loader.stats()["private_batches"] == 0


def test_a_reader_behind_the_stream_works_alone_and_joins_when_it_can() -> None:
    with Feeder(pipe("numpy"), capacity=16) as feeder:
        ahead = iter(Job(epochs=(5, 9), name="ahead").attach(feeder.address))
        next(ahead)
        job = Job(epochs=(0, 3), name="behind")
        loader = job.attach(feeder.address)
        assert not loader.shared
        records = []
        for batch in loader:
            records.append(pipes.record(batch))
            if batch.epoch == 0 and batch.step == 3:
                ahead.close()
        assert records == pipes.alone(job)
        assert loader.stats()["private_batches"] >= 8 and loader.stats()["shared_batches"] >= 8


def other_noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**pipes.noise(sample, rng), "label": 0}


def numpy_pipe(stage: Any = pipes.noise, fields: Any = None, **other: Any) -> Pipeline:
    return Pipeline(pipe("plain").source, **{"seed": 3, **other}).map(stage, fields=fields)


def test_another_pipeline_is_refused_and_the_difference_named() -> None:
    fields = dict(numpy_pipe().fields)
    others = [
        (numpy_pipe(other_noise), "differ: stage 0 other_noise at the consumer, another stage 0 noise at"),
        (numpy_pipe(seed=4), "differ: seed at the consumer"),
        (numpy_pipe(shuffle=False), "differ: shuffle"),
        (numpy_pipe(on_error="skip"), "differ: on_error"),
        (numpy_pipe().take_stages(0), "differ: 0 stages at the consumer, 1 at the feeder"),
        (Pipeline(sources.arrays(x=[1]), seed=3), "differ: source at the consumer"),
        (numpy_pipe(fields={**fields, "label": ((), "int32")}), "the fields differ: .*int32"),
    ]
    with Feeder(numpy_pipe()) as feeder:
        for mine, difference in others:
            with pytest.raises(PipelineError, match=difference):
                attach(feeder.address, mine, 8)
        turned = numpy_pipe(fields=dict(reversed(fields.items())))  # their order is none
        batches = [pipes.record(batch) for batch in attach(feeder.address, turned, 8, range(2), copy=True)]
        assert [record[-1] for record in batches] == [fields for *_, fields in pipes.alone(Job())]


def test_what_cannot_be_compared_works_alone_with_a_warning() -> None:
    with Feeder(numpy_pipe(pipes.nameless), capacity=24) as feeder:
        with pytest.warns(UserWarning, match=r"working alone: .*nameless cannot be identified .*give id="):
            loaders = [attach(feeder.address, numpy_pipe(pipes.nameless), 8, 1)]
        loaders.append(attach(feeder.address, feeder.pipeline, 8, 1))  # the very same object needs no comparison
        for loader, way in zip(loaders, ("private_batches", "shared_batches"), strict=True):
            assert len(list(loader)) == 8 == loader.stats()[way]


def test_a_batch_too_large_for_the_ring_is_told_the_capacity_it_needs() -> None:
    block, batch, big = 20, 30, partial(Pipeline, sources.arrays(x=np.arange(1000)))
    needed = min_capacity(batch, block)
    for capacity in (40, needed - 1):
        with Feeder(big(), capacity=capacity, block=block) as feeder, pytest.raises(PipelineError) as caught:
            attach(feeder.address, big(), batch)
        assert f"batch of {batch} does not fit" in (text := str(caught.value)) and f"at least {needed}, it" in text
    with Feeder(big(), capacity=needed, block=block) as feeder:
        assert len(list(attach(feeder.address, big(), batch))) == -(-1000 // batch)


@pytest.mark.parametrize("kind", ["missing", "a file", "deserted"])
def test_where_no_feeder_answers_one_works_alone_and_says_so(kind: str, tmp_path: Path) -> None:
    address = tmp_path / "socket"
    if kind == "a file":
        address.write_text("")
    if kind == "deserted":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deserted:
            deserted.bind(str(address))
    with pytest.warns(UserWarning, match="working alone: no feeder at .*socket"):
        records, counts = pipes.shared(Job(), str(address))
    assert records == pipes.alone(Job()) and counts["shared_batches"] == 0
    if kind == "deserted":
        with Feeder(pipe("numpy"), address=address):  # takes the address
            assert pipes.shared(Job(), str(address))[1]["private_batches"] == 0


def test_a_feeder_of_another_version_is_refused_in_words(tmp_path: Path) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.send(json.dumps({"v": 1, "kind": "welcome"}).encode())

    with messages.listen(str(tmp_path / "socket")) as listener:
        server = threading.Thread(target=answer)
        server.start()
        with pytest.raises(PipelineError, match=r"of this version .* message of version 1: .* version 2"):
            attach(tmp_path / "socket", pipe("numpy"), 8)
        server.join()


HELLO: dict[str, Any] = {"v": 2, "kind": "hello", "scheme": SCHEME, "tokens": ["t"], "parts": [], "fields": []}
HELLO |= {"why_unsure": None, "name": "x", "rank": 0, "world": 1, "batch_size": 8}
HELLO |= {"first_epoch": 0, "place": 0, "epochs": 1}


def fitting(pipeline: Pipeline) -> dict[str, Any]:
    """A hello that a feeder of this pipeline takes."""
    fields = [[k, list(s), d] for k, (s, d) in sorted(pipeline.fields.items())]
    return {**HELLO, "tokens": pipeline.describe_for_peers()["tokens"], "fields": fields}


def connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    connection.settimeout(pipes.LIMIT_S)
    return connection


GARBAGE = [b"\xff\xfe", b"[" * 50_000, b'"text"', b"[1]", messages.LOOK, b'{"v": 2, "kind": "resident"}']
GARBAGE += [b"{}", b"0" * 200_000, b'{"v": 2}', b'{"v": 2, "kind": "resident", "key": ["a"]}']
ODD: list[tuple[str, Any, str]] = [
    ("name", "", "name must be a text of 1 to 255 characters"),
    ("name", "n" * 300, "name must be a text of 1 to 255 characters"),
    ("name", None, "name must be a text of 1 to 255 characters"),
    ("name", "half a pair: \ud800", "name must be a text that UTF-8 can encode"),
    ("rank", -1, "rank must be in 0..0 of world 1"),
    ("rank", True, "rank must be an integer"),
    ("rank", float("inf"), "rank must be an integer"),
    ("world", 10**30, "world must be in 1..1048576"),
    ("batch_size", 0, "batch_size must be in 1..4611686018427387904"),
    ("batch_size", 10**30, "batch_size must be in 1..4611686018427387904"),
    ("batch_size", "many", "batch_size must be an integer"),
    ("first_epoch", -3, "first_epoch must be in"),
    ("epochs", 1.5, "epochs must be an integer"),
    ("epochs", 1 << 80, "epochs must be in"),
    ("place", N + 1, f"place must be in 0..{N}"),
    ("scheme", SCHEME - 1, "install the same version"),
]


@pytest.mark.parametrize("what", ["ring", "resident set"])
def test_a_reader_can_neither_write_to_the_memory_that_it_is_given_nor_make_it_smaller(what: str) -> None:
    pipeline = pipe("numpy")
    hello: dict[str, Any] = fitting(pipeline)
    if what == "resident set":
        hello = {"v": 2, "kind": "resident", "key": "still", **pipe("still").describe_for_peers()}
    with (
        Feeder(pipeline, capacity=16, resident={"still": pipe("still")}) as feeder,
        connected(feeder.address) as connection,
    ):
        connection.send(json.dumps(hello).encode())
        answer, (given, *others), _, _ = socket.recv_fds(connection, 1 << 16, 3)
        assert json.loads(answer)["kind"] == ("resident" if what == "resident set" else "welcome")
        memory, size = [given], os.fstat(given).st_size
        with contextlib.suppress(PermissionError):  # root may open it again to write
            memory.append(os.open(f"/proc/self/fd/{given}", os.O_RDWR))
        for descriptor in memory:
            for other in (0, 2 * size):
                with pytest.raises(OSError, match=r"Operation not permitted|Invalid argument"):
                    os.ftruncate(descriptor, other)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(given, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(given, size, flags=mmap.MAP_SHARED)
        for descriptor in (*memory, *others):
            os.close(descriptor)


def test_a_feeder_survives_whatever_is_said_to_it(tmp_path: Path) -> None:
    pipeline, job = pipe("numpy"), Job(epochs=(0, 3))
    fit = fitting(pipeline)
    hello = json.dumps(fit).encode()
    odd = [(json.dumps({**fit, name: value}).encode(), reason) for name, value, reason in ODD]
    with Feeder(pipeline, capacity=16, address=tmp_path / "made" / "socket") as feeder:
        assert os.stat(feeder.address).st_mode & 0o777 == 0o600, "it is for this user only"
        assert os.stat(os.path.dirname(feeder.address)).st_mode & 0o777 == 0o700
        for message, reason in [*((garbage, "") for garbage in GARBAGE), *odd]:
            with connected(feeder.address) as connection:
                connection.send(message)
                answer = json.loads(connection.recv(1 << 16))
            assert answer["kind"] == "refused" and reason in answer["reason"], (message[:99], answer)
            assert len(answer["reason"]) < 300 and feeder.stats()["members"] == 0
        connected(feeder.address).close()  # says nothing
        for nonsense in (b"", b"x" * 17, b"{}"):
            with connected(feeder.address) as connection:
                connection.send(hello)
                connection.recv(1 << 16)
                connection.send(nonsense)
        for values in itertools.product((2**63 - 1, -(2**63), 0), repeat=3):
            with connected(feeder.address) as connection:
                connection.send(hello)
                _, given, _, _ = socket.recv_fds(connection, 1 << 16, 3)
                own = words.map_words(given[1], writable=True)
                own[words.RELEASED], own[words.WANT], own[words.SINCE] = values
                connection.send(messages.LOOK)
                for descriptor in given:
                    os.close(descriptor)
        with connected(feeder.address) as greedy:  # asks and asks and never reads the answers
            greedy.send(json.dumps({**fit, "name": "greedy"}).encode())
            for _ in range(3000):
                greedy.send(messages.LOOK)
        assert pipes.shared(job, feeder.address)[0] == pipes.alone(job)
        assert feeder.stats()["failure"] is None and feeder.stats()["restarts"] == 0


@pytest.mark.parametrize("kind", ["plain", "begun skip", "ended skip numpy"])
def test_where_each_epoch_has_the_same_samples_they_are_prepared_once_for_readers_at_any_pace(kind: str) -> None:
    jobs = [Job(kind=kind, epochs=(0, 4)), Job(kind=kind, epochs=(2, 4), batch_size=7, start_step=3)]
    jobs += [Job(kind=kind, epochs=(1, 3), batch_size=N, rank=rank, world=2) for rank in range(2)]
    with Feeder(pipe(kind.replace("ended skip numpy", "begun skip")), workers=2, policy="detach") as feeder:
        assert feeder.capacity == N
        loader = Job(kind=kind, epochs=(0, 2), name="stands still").attach(feeder.address)
        slow = iter(loader)
        first = pipes.record(next(slow))
        results = pipes.together([partial(pipes.shared, job, feeder.address) for job in jobs])
        assert [records for records, _ in results] == [pipes.alone(job) for job in jobs]
        assert all(counts["private_batches"] == 0 for _, counts in results)
        assert feeder.stats()["prepared"] == N and feeder.stats()["detached"] == 0
        late = iter(Job(kind=kind, epochs=(0, 3), name="late").attach(feeder.address))
        batches = [pipes.record(batch) for batch in itertools.islice(late, 20)]
    with warnings.catch_warnings(record=True):  # the feeder is gone, its samples are not
        batches += [pipes.record(batch) for batch in late]
        assert [first, *map(pipes.record, slow)] == pipes.alone(Job(kind=kind, epochs=(0, 2)))
    assert batches == pipes.alone(Job(kind=kind, epochs=(0, 3)))
