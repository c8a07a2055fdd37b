"""What holds for every source: shared as alone, resumed, fingerprinted, pickled, divided; without copies."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from core_pipes import leaves_nothing  # noqa: F401
from source_cases import CASES, JOBS, MEMBERS, N, arguments, canonical, make_pipeline, read, rows

from pipelines import Feeder, PipelineError, attach, memory_pickle, sources
from pipelines.child_processes import child_environment

WAIT_S = 200


@pytest.fixture(autouse=True)
def collects(leaves_nothing: None) -> Iterator[None]:  # noqa: F811
    """After each test: a spool goes with the source, which a feeder's cycles of references may keep."""
    yield
    gc.collect()


BIG, SMALL, ROW_BYTES = 3000, 60, 8192  # 24 MB


def start(case: str, folder: Path, address: str, jobs: list[Any]) -> subprocess.Popen[str]:
    code = "import sys, source_cases; source_cases.main(*sys.argv[1:])"
    command = [sys.executable, "-c", code, case, str(folder), address, json.dumps(jobs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment())


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out)
    return found


#: Sources whose data stay in files.
OF_FILES = [name for name, case in CASES.items() if case.file]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def write(case: str, tmp_path: Path, **changes: int) -> Path:
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    CASES[case].write(folder, rows(**changes))
    return folder


def test_eight_consumers_in_other_processes_read_what_each_reads_alone_also_from_the_middle_on(
    case: str, tmp_path: Path
) -> None:
    folder = write(case, tmp_path)
    pipe = make_pipeline(CASES[case].open(folder))
    alone = [read(pipe.loader(**arguments(job))) for job in JOBS]
    whole, rest = alone[0], alone[1]
    steps = len(whole) // 2
    assert rest[: steps - 3] == whole[3:steps] and rest[steps - 3 :] == whole[steps:], "a resume is what is left"
    for epoch in (0, 1):
        seen = [index for e, _, _, indices, _ in whole if e == epoch for index in indices]
        assert sorted(seen) == list(range(N)), "each record exactly once"
    with Feeder(pipe, workers=2, expect=2 * MEMBERS) as feeder:
        # They open the source anew: only its fingerprint says that it is the same.
        processes = [start(case, folder, feeder.address, JOBS) for _ in range(2)]
        found = [finish(process) for process in processes]
    assert pipe.fingerprint is not None
    for process in found:
        assert process["fingerprint"] == pipe.fingerprint
        assert process["batches"] == alone
        assert all(stats["shared_batches"] > 0 for stats in process["stats"])


def test_the_fingerprint_changes_with_the_data(case: str, tmp_path: Path) -> None:
    first = make_pipeline(CASES[case].open(write(case, tmp_path))).fingerprint
    assert first == make_pipeline(CASES[case].open(tmp_path / "data")).fingerprint is not None
    others = []
    for change in ({"shift": 1}, {"n": N + 2}):
        source = CASES[case].open(write(case, tmp_path, **change))
        others.append(make_pipeline(source).fingerprint)
    assert len({first, *others}) == 3


def test_a_pickled_source_reads_the_same_records(case: str, tmp_path: Path) -> None:
    source = CASES[case].open(write(case, tmp_path))
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
        folder = tmp_path / str(nbytes)
        folder.mkdir()
        CASES[case].write(folder, rows(nbytes=nbytes))
        source = CASES[case].open(folder)
        source[3]
        sizes.append(len(pickle.dumps(source, protocol=5)))
    # What may grow: the names and types of CSV's columns, places of Arrow's record batches.
    assert sizes[1] < sizes[0] + N * 4096 / 4, "53 rows of 4 KB are not in it"


def test_parts_have_every_record_once_and_identities_of_their_own(case: str, tmp_path: Path) -> None:
    source = CASES[case].open(write(case, tmp_path))
    one, two = source.split(0.7, seed=1)
    first = source.take(9)
    found = sorted(canonical(record) for part in (one, two) for record in part)
    assert found == sorted(canonical(record) for record in source)
    assert [canonical(record) for record in first] == [canonical(source[i]) for i in range(9)]
    identities = {json.dumps(each.identity()) for each in (source, one, two, first)}
    assert len(identities) == 4


def test_a_block_shuffle_reads_every_record_once_an_epoch(case: str, tmp_path: Path) -> None:
    source = CASES[case].open(write(case, tmp_path))
    assert (source.groups is not None) == CASES[case].has_groups
    if source.groups is None:
        with pytest.raises(PipelineError, match="shuffle='blocks' is for a source that is read in groups"):
            make_pipeline(source, shuffle="blocks")
        return
    assert source.groups[0] == 0 and source.groups[-1] == N and (np.diff(source.groups) > 0).all()
    pipe = make_pipeline(source, shuffle="blocks", shuffle_window=2)
    expected = [make_pipeline(source).map(drop_noise).loader(N, 1)]
    by_index = {}
    for batch in expected[0]:
        by_index = dict(zip(batch["index"].tolist(), batch["digest"].tolist(), strict=True))
    for batch in pipe.loader(N, 1):
        assert dict(zip(batch["index"].tolist(), batch["digest"].tolist(), strict=True)) == by_index


def drop_noise(sample: dict[str, Any]) -> dict[str, Any]:
    return {"digest": sample["digest"]}


@pytest.mark.parametrize("case", OF_FILES, indirect=True)
def test_a_file_that_was_changed_since_is_not_read(case: str, tmp_path: Path) -> None:
    folder = write(case, tmp_path)
    source = pickle.loads(cloudpickle.dumps(CASES[case].open(folder)))  # as in a preparation worker
    changed = folder / CASES[case].file
    os.utime(changed, ns=(1, 1))
    pipe = make_pipeline(source, on_error="raise")
    failed = []
    for index in range(N):
        try:
            pipe.source[index]
        except PipelineError as error:
            failed.append(str(error))
    assert failed and all(changed.name in said and "was changed" in said for said in failed)


def read_private_bytes(pid: int) -> int:
    """Memory of a process that it shares with no other and with no file."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this kernel does not tell what memory is anonymous")


def measure_worker(case: str, folder: Path) -> int:
    """Bytes that one preparation worker has for itself after two epochs."""
    pipe = make_pipeline(CASES[case].open(folder))
    with Feeder(pipe, workers=1, expect=1) as feeder:
        for _ in attach(feeder.address, pipe, batch_size=50, epochs=2):
            pass
        (worker,) = feeder.stats()["workers"]
        return read_private_bytes(worker)


def test_a_workers_own_memory_does_not_grow_with_the_data(case: str, tmp_path: Path) -> None:
    used = []
    for n in (SMALL, BIG):
        folder = tmp_path / str(n)
        folder.mkdir()
        wide = {**rows(n), "text": ["t" * ROW_BYTES] * n} if case == "csv" else rows(n, ROW_BYTES)
        CASES[case].write(folder, wide)
        used.append(measure_worker(case, folder))
    assert used[1] - used[0] < BIG * ROW_BYTES / 3, f"{used[0] >> 20} MiB for a little, {used[1] >> 20} for 24 MB"


def test_every_source_has_a_case_here_and_a_row_in_both_tables_of_the_page_of_data() -> None:
    names = set(sources.__all__) - {"Source", "Subset"}
    assert {case.replace(",", " ").split()[0] for case in CASES} == names
    page = Path(__file__).parents[2] / "docs" / "how-to" / "data.md"
    first_cells = [line.split("|")[1] for line in page.read_text().splitlines() if line.startswith("| `")]
    rows = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(rows) == sorted([*names, *names])
