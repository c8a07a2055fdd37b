"""The contract of sources: what each of them passes; a new one is a row in `source_cases.CASES`."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from source_cases import CASES, JOBS, MEMBERS, N, canonical, make_pipeline, read, rows

from pipelines import Feeder, Pipeline, PipelineError, SampleError, attach, sources
from pipelines.ipc import memory_pickle
from pipelines.ipc.child_processes import child_environment

BIG, SMALL, ROW_BYTES = 3000, 60, 8192  # 24 MB

#: Sources whose data stay in files.
OF_FILES = [name for name, case in CASES.items() if case.file]

#: Cases whose files are too many to be read for their identity, or are opened by their path in the data.
KNOWN_BY_TIME = ("image_folder", "image_folder, given labels")

#: Cases whose files another library opens.
OPENED_BY_OTHERS = ("arrays of np.memmap", "huggingface")

#: Of each way to hold records one, for what takes processes.
WAYS = ("arrays", "csv", "hdf5", "iterable", "parquet", "tar")


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def write(case: str, folder: Path, **changes: int) -> Path:
    folder.mkdir(exist_ok=True)
    CASES[case].write(folder, rows(**changes))
    return folder


@pytest.fixture(scope="module")
def folder(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(case, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., Any]]:
    command = [sys.executable, "-c", "import source_cases; source_cases.main()"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=child_environment(), **pipes) as process:

        def ask(**request: str) -> Any:
            print(json.dumps(request), file=process.stdin, flush=True)
            answer: str = process.stdout.readline()  # type: ignore[union-attr]
            assert answer, f"the other process ended with {process.wait(60)}"
            return json.loads(answer)

        yield ask


def test_records_are_the_plain_rows_in_any_order(case: str, folder: Path) -> None:
    source, x = CASES[case].open(folder), rows()["x"]
    order = [*range(0, N, 2), *range(1, N, 2)] if case == "image_folder" else list(range(N))
    assert len(source) == N
    for index in np.random.default_rng(0).permutation(N):
        row = CASES[case].x(source[index])
        assert np.array_equal(row, x[order[index]]) and len(row) == x.shape[1]
        assert canonical(source[index - N]) == canonical(source[index])
    for outside in (N, -N - 1):
        with pytest.raises(IndexError, match=f"the source has {N}"):
            source[outside]
    with pytest.raises(TypeError):
        source["3"]
    record, expected = source[3], canonical(source[3])
    for value in record.values():
        if isinstance(value, np.ndarray) and value.ndim:
            value[:] = 0
    assert canonical(source[3]) == expected, "a record is the reader's own"


@pytest.mark.parametrize("case", [*WAYS, "huggingface", "image_folder"], indirect=True)
def test_consumers_in_another_process_read_what_one_reads_alone_also_from_the_middle_on(
    case: str, folder: Path, ask: Callable[..., Any]
) -> None:
    pipe = make_pipeline(CASES[case].open(folder))
    alone = [read(pipe.loader(**job)) for job in JOBS]
    whole, resumed = alone[0], alone[1]
    steps = len(whole) // 2
    assert resumed[: steps - 3] == whole[3:steps] and resumed[steps - 3 :] == whole[steps:]
    for number in (0, 1):
        seen = [index for epoch, _, _, indices, _ in whole if epoch == number for index in indices]
        assert sorted(seen) == list(range(N)), "every record exactly once"
    workers = 1 + list(CASES).index(case) % 2
    with Feeder(pipe, expect=MEMBERS, gate_timeout_s=600, workers=workers) as feeder:
        # It opens the source anew: only its fingerprint says that it is the same.
        answer = ask(case=case, folder=str(folder), address=feeder.address)
    assert answer["fingerprint"] == pipe.fingerprint is not None
    assert answer["batches"] == alone and all(answer["shared"])


def test_the_fingerprint_is_that_of_the_data_by_whatever_path(
    case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(place: Path) -> str | None:
        return make_pipeline(CASES[case].open(place)).fingerprint

    first = fingerprint(folder)
    monkeypatch.chdir(folder.parent)
    assert fingerprint(Path(folder.name)) == first is not None
    others = [fingerprint(write(case, tmp_path / "data", **change)) for change in ({}, {"shift": 1}, {"n": N + 2})]
    assert others[0] == first or CASES[case].file, "other files are other data"
    assert len({first, *others[1:]}) == 3 and others[0] not in others[1:]


def test_a_pickled_source_reads_the_same_records(case: str, folder: Path) -> None:
    source = CASES[case].open(folder)
    expected = [canonical(source[i]) for i in range(N)]
    payload = memory_pickle.dump(source)
    try:
        for copy in (pickle.loads(cloudpickle.dumps(source)), memory_pickle.load(payload)):
            assert [canonical(copy[i]) for i in reversed(range(N))][::-1] == expected
            assert copy.identity() == source.identity() and len(copy) == N
            assert copy.where(7) == source.where(7)
            again = pickle.loads(cloudpickle.dumps(copy))
            assert canonical(again[N - 1]) == expected[-1]
    finally:
        os.close(payload)


@pytest.mark.parametrize("case", OF_FILES, indirect=True)
def test_a_pickle_of_files_has_none_of_their_data(case: str, tmp_path: Path) -> None:
    sizes = []
    for nbytes in (12, 4096):
        source = CASES[case].open(write(case, tmp_path / str(nbytes), nbytes=nbytes))
        source[3]
        sizes.append(len(pickle.dumps(source, protocol=5)))
    # What may grow: the names and types of CSV's columns, places of Arrow's record batches.
    assert sizes[1] < sizes[0] + N * 4096 / 4, "53 rows of 4 KB are not in it"


def test_parts_have_every_record_once_and_identities_of_their_own(case: str, folder: Path) -> None:
    source = CASES[case].open(folder)
    one, two = source.split(0.7, seed=1)
    first = source.take(9)
    assert repr(first) == f"9 of {source!r}" and repr(source).endswith(f"({N} records)")
    found = sorted(canonical(record) for part in (one, two) for record in part)
    assert found == sorted(canonical(record) for record in source)
    assert [canonical(record) for record in first] == [canonical(source[i]) for i in range(9)]
    assert canonical(pickle.loads(cloudpickle.dumps(two))[3]) == canonical(two[3])
    identities = {json.dumps(each.identity()) for each in (source, one, two, first)}
    assert len(identities) == 4


def test_a_block_shuffle_reads_every_record_once_an_epoch(case: str, folder: Path) -> None:
    source = CASES[case].open(folder)
    assert (source.groups is not None) == CASES[case].has_groups
    if source.groups is None:
        with pytest.raises(PipelineError, match="shuffle='blocks' is for a source that is read in groups"):
            make_pipeline(source, shuffle="blocks")
        return
    assert source.groups[0] == 0 and source.groups[-1] == N and (np.diff(source.groups) > 0).all()
    (plain,) = make_pipeline(source).loader(N, 1)
    (blocks,) = make_pipeline(source, shuffle="blocks", shuffle_window=2).loader(N, 1)
    found, expected = (
        dict(zip(batch["index"].tolist(), batch["digest"].tolist(), strict=True)) for batch in (blocks, plain)
    )
    assert found == expected and len(found) == N


def read_all(source: sources.Source) -> tuple[list[str], list[str]]:
    records, failed = [], []
    for index in range(N):
        try:
            records.append(repr(source[index]))
        except PipelineError as error:
            failed.append(str(error))
    return records, failed


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("change", [flip_a_bit, cut, Path.unlink], ids=["changed", "cut off", "missing"])
@pytest.mark.parametrize("case", OF_FILES, indirect=True)
def test_a_file_that_changes_under_a_run_is_not_read(
    case: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = write(case, tmp_path / "data")
    opened = CASES[case].open(folder)
    before = opened.identity()
    source = pickle.loads(cloudpickle.dumps(opened))  # as in a preparation worker
    file = folder / CASES[case].file
    change(file)
    _, failed = read_all(source)
    reason = "No such file" if change is Path.unlink else "was changed"
    assert all(re.match(r"sample \d+ \(", message) for message in failed)
    assert failed and all(file.name in message and reason in message for message in failed)
    errors = (OSError, ValueError) if case in OPENED_BY_OTHERS else (PipelineError,)
    with contextlib.suppress(*errors):  # the flipped bit may be of what holds the records together
        assert CASES[case].open(folder).identity() != before


def damage(content: bytes, seed: int) -> bytes:
    """Flip one to eight bits; of a third of the seeds, cut the end off."""
    rng, damaged = np.random.default_rng(seed), bytearray(content)
    for _ in range(rng.integers(1, 9)):
        damaged[rng.integers(len(damaged))] ^= 1 << int(rng.integers(8))
    return bytes(damaged[: rng.integers(len(damaged))] if seed % 3 == 0 else damaged)


@pytest.mark.filterwarnings("ignore:.*as most lines lack it")
@pytest.mark.parametrize("case", [name for name in OF_FILES if name not in OPENED_BY_OTHERS], indirect=True)
def test_wherever_a_file_is_damaged_the_error_names_it(case: str, tmp_path: Path) -> None:
    folder = write(case, tmp_path / "data")
    before = CASES[case].open(folder).identity()
    file = folder / CASES[case].file
    whole, failed = file.read_bytes(), list[str]()
    for seed in range(40):
        file.write_bytes(damage(whole, seed))
        try:
            source = CASES[case].open(folder)
        except PipelineError as error:
            failed.append(str(error))
            continue
        assert source.identity() != before
        for index in range(len(source)):
            try:
                source[index]
            except SampleError as error:
                failed.append(str(error))
    assert failed or case.startswith("image_folder")  # its records are the bytes as they are
    assert all(file.name in message for message in failed)


@pytest.mark.parametrize("case", OF_FILES, indirect=True)
def test_files_elsewhere_and_where_all_of_their_bytes_are_known_of_other_times_are_the_same_data(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(case, tmp_path / "data")
    opened = CASES[case].open(folder)
    source = pickle.loads(cloudpickle.dumps(opened))
    touched = folder / CASES[case].file
    for whole_bytes in (0, 1 << 30):  # known by blocks of their bytes, and by all
        monkeypatch.setattr("pipelines.sources._files.WHOLE_BYTES", whole_bytes)
        moved = tmp_path / f"moved-{whole_bytes}"
        shutil.copytree(folder, moved)  # with the times of the files
        before = CASES[case].open(folder).identity()
        assert CASES[case].open(moved).identity() == before
        if not whole_bytes and case != "arrays of np.memmap":  # then a file with another time may be another one
            os.utime(moved / CASES[case].file, ns=(1, 1))
            assert CASES[case].open(moved).identity() != before
    monkeypatch.undo()
    os.utime(touched, ns=(1, 1))
    records, failed = read_all(source)
    is_known = case not in KNOWN_BY_TIME
    assert (CASES[case].open(folder).identity() == opened.identity()) == is_known
    assert (not failed and records == read_all(CASES[case].open(folder))[0]) == is_known
    assert all(touched.name in message and "was changed" in message for message in failed)


def measure_worker(case: str, folder: Path) -> int:
    """Bytes that one preparation worker shares with no other and with no file after two epochs."""
    pipe = Pipeline(CASES[case].open(folder), shuffle=False).map(lambda sample: {"count": np.int64(len(sample))})
    with Feeder(pipe, workers=1, expect=1) as feeder:
        assert len(list(attach(feeder.address, pipe, batch_size=50, epochs=2))) > 1
        (worker,) = feeder.stats()["workers"]
        memory = Path(f"/proc/{worker}/smaps_rollup").read_text()
    return int(re.findall(r"^Pss_Anon: +([0-9]+)", memory, re.MULTILINE)[0]) * 1024


@pytest.mark.parametrize("case", WAYS, indirect=True)
def test_a_workers_own_memory_does_not_grow_with_the_data(case: str, tmp_path: Path) -> None:
    used = []
    for n in (SMALL, BIG):
        folder = tmp_path / str(n)
        folder.mkdir()
        # Texts, where numbers are long to parse.
        CASES[case].write(
            folder, {**rows(n), "text": ["t" * ROW_BYTES] * n} if case == "csv" else rows(n, ROW_BYTES)
        )
        used.append(measure_worker(case, folder))
    assert used[1] - used[0] < BIG * ROW_BYTES / 3, f"{used[0] >> 20} MiB for a little, {used[1] >> 20} for 24 MB"


def test_every_source_has_a_case_here_and_a_row_in_both_tables_of_the_page_of_data() -> None:
    names = set(sources.__all__) - {"Source", "Subset"}
    assert {case.replace(",", " ").split()[0] for case in CASES} == names
    page = Path(__file__).parents[2] / "docs" / "how-to" / "data.md"
    first_cells = [line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("| `")]
    rows = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(rows) == sorted([*names, *names])
