"""Sources of files on a server: real requests on the loopback, what is fetched how often, limits, failures."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import Pipeline, PipelineError, sources
from pipelines.errors import SampleError

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


class Server(ThreadingHTTPServer):
    """Serves files of a dict; `gives_parts`: by ranges, too. Counts bodies by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.gives_parts, self.bodies, self.sent = True, Counter[str](), Counter[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        body = self.server.files.get(self.path)
        if body is None:
            self.send_error(404)
            return
        tag, part = f'"{hash(body)}"', body
        given = self.headers.get("Range") if self.server.gives_parts else None
        if given is not None:
            first, last = given.removeprefix("bytes=").split("-")
            part = body[int(first) : int(last or len(body)) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}")
        else:
            self.send_response(200)
        if self.server.gives_parts:
            self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", tag)
        self.end_headers()
        if with_body:
            self.server.sent[self.path] += len(part)
            if given is None:
                self.server.bodies[self.path] += 1
            self.wfile.write(part)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("ENSEMBLE_SOURCES_DIR", str(tmp_path / "kept"))
    monkeypatch.delenv("ENSEMBLE_SOURCES_BYTES", raising=False)
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def make_parquet(first: int, rows: int = 40) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(first).random((rows, 200))
    pq.write_table(pa.table({"x": np.arange(first, first + rows), "noise": list(noise)}), file)
    return file.getvalue()


def make_tar(first: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(first, first + 5):
            for extension, body in (("txt", b"t%d" % number), ("cls", b"%d" % (number % 3))):
                info = tarfile.TarInfo(f"{number:04d}.{extension}")
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
    return file.getvalue()


def kept(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "kept" / "ray-ensemble" / "sources"
    return [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def test_parquet_by_addresses_is_fetched_when_it_is_read_and_once_for_many_readers(
    server: Server, tmp_path: Path
) -> None:
    server.files = {f"/part-{number}.parquet": make_parquet(40 * number) for number in range(3)}
    source = sources.parquet(f"{server.url}/part-{{0..2}}.parquet")
    assert len(source) == 120 and sum(server.bodies.values()) == 0, "footers alone"
    assert sum(server.sent.values()) < 0.9 * sum(map(len, server.files.values()))
    made = [sources.parquet(f"{server.url}/part-2.parquet") for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda reader: int(reader[20]["x"]), made)) == [100] * 8
    assert source[100]["x"] == 100 and server.bodies == {"/part-2.parquet": 1}
    batches = list(Pipeline(source, seed=0).loader(16, epochs=2))
    assert sorted(np.concatenate([batch["x"].numpy() for batch in batches]).tolist()) == sorted([*range(120)] * 2)
    again = sources.parquet([f"{server.url}/part-{number}.parquet" for number in range(3)])
    assert again[3]["x"] == 3 and set(server.bodies.values()) == {1}
    assert Pipeline(again).fingerprint == Pipeline(source).fingerprint
    assert sorted(path.stat().st_size for path in kept(tmp_path)) == sorted(map(len, server.files.values()))


def test_shards_of_webdataset_rows_and_lines(server: Server) -> None:
    server.files = {f"/shard-{number:02d}.tar": make_tar(5 * number) for number in range(2)}
    server.files |= {"/t.csv": b"a,b\n1,x\n2,y\n", "/t.jsonl": b'{"a": 1}\n{"a": 2}\n'}
    tar = sources.tar(f"{server.url}/shard-{{00..01}}.tar")
    assert len(tar) == 10 and tar[7]["txt"] == b"t7"
    assert sources.csv(f"{server.url}/t.csv")[1] == {"a": 2, "b": "y"}
    assert sources.jsonl(f"{server.url}/t.jsonl")[1]["a"] == 2
    server.gives_parts, server.files["/a.parquet"] = False, make_parquet(0)
    assert sources.parquet(f"{server.url}/a.parquet")[5]["x"] == 5, "of the whole file"


def test_the_folder_keeps_to_its_limit_and_gives_up_what_was_used_least_lately(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files = {f"/{number}.parquet": make_parquet(40 * number) for number in range(6)}
    size = max(map(len, server.files.values()))
    monkeypatch.setenv("ENSEMBLE_SOURCES_BYTES", str(3.5 * size))
    source = sources.parquet([f"{server.url}/{number}.parquet" for number in range(6)])
    assert [source[40 * number]["x"] for number in range(6)] == [0, 40, 80, 120, 160, 200]
    assert len(kept(tmp_path)) == 3
    before = server.bodies.copy()
    again = sources.parquet(f"{server.url}/5.parquet")
    assert again[0]["x"] == 200 and server.bodies == before, "nothing was fetched"
    assert sources.parquet(f"{server.url}/0.parquet")[0]["x"] == 0
    assert server.bodies - before == {"/0.parquet": 1} and source[120]["x"] == 120, "which is decoded"
    assert sum(path.stat().st_size for path in kept(tmp_path)) <= 3.5 * size
    monkeypatch.setenv("ENSEMBLE_SOURCES_BYTES", "much")
    with pytest.raises(PipelineError, match="must be a number of bytes, got 'much'"):
        sources.parquet(f"{server.url}/0.parquet")


def test_a_file_that_is_another_one_now_is_seen(server: Server) -> None:
    server.files = {"/a.csv": b"a\n1\n2\n"}
    one = sources.csv(f"{server.url}/a.csv")
    before = Pipeline(one).fingerprint
    server.files["/a.csv"] = b"a\n1\n3\n"
    assert Pipeline(sources.csv(f"{server.url}/a.csv")).fingerprint != before
    server.files["/b.parquet"] = make_parquet(0)
    two = sources.parquet(f"{server.url}/b.parquet")
    server.files["/b.parquet"] = make_parquet(1)
    with pytest.raises(SampleError, match="was changed after its records were indexed"):
        two[0]


def test_what_cannot_be_read_and_a_folder_that_others_write_to_are_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PipelineError, match="no such file"):
        sources.csv(f"{server.url}/nothing.csv")
    server.files = {"/a.parquet": make_parquet(0), "/a.csv": b"a\n1\n"}
    source = sources.parquet(f"{server.url}/a.parquet")
    del server.files["/a.parquet"]
    with pytest.raises(SampleError, match="cannot be fetched"):
        source[0]
    assert kept(tmp_path) == [], "no part is left"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("ENSEMBLE_SOURCES_DIR", str(tmp_path / "open"))
    with pytest.raises(PipelineError, match="must be a folder that only you can write to"):
        sources.csv(f"{server.url}/a.csv")


def test_a_source_goes_to_machines_with_another_folder(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files = {"/a.parquet": make_parquet(0)}
    sent = pickle.dumps(sources.parquet(f"{server.url}/a.parquet"))
    shutil.rmtree(tmp_path / "kept")
    assert pickle.loads(sent)[3]["x"] == 3
    monkeypatch.setenv("ENSEMBLE_SOURCES_DIR", str(tmp_path / "elsewhere"))
    assert pickle.loads(sent)[4]["x"] == 4 and any((tmp_path / "elsewhere").iterdir())
    theirs = tmp_path / "elsewhere" / f"{'0' * 32}-x~1"
    theirs.write_bytes(b"somebody's own")
    old = tmp_path / "elsewhere" / "ray-ensemble" / "sources" / theirs.name
    old.write_bytes(b"left")
    server.files["/b.parquet"] = make_parquet(1)
    assert sources.parquet(f"{server.url}/b.parquet")[0]["x"] == 1 and not old.exists() and theirs.exists()


def test_braces_name_files_of_this_machine_too(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number:02d}.csv").write_text(f"a\n{number}\n")
    os.rename(tmp_path / "02.csv", tmp_path / "{a,b}.csv")
    assert [record["a"] for record in sources.csv(str(tmp_path / "{00..01}.csv"))] == [0, 1]
    assert [record["a"] for record in sources.csv(str(tmp_path / "{a,b}.csv"))] == [2], "a file of that name"
    with pytest.raises(PipelineError, match=r"02\.csv"):
        sources.csv(str(tmp_path / "{00..02}.csv"))


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The files of a bucket, on a server of its own that speaks S3."""
    pytest.importorskip("s3fs")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("ENSEMBLE_SOURCES_DIR", str(tmp_path / "kept"))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "told-by-the-environment")
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket="photos")
        yield lambda name, body: client.put_object(Bucket="photos", Key=name, Body=body)
    finally:
        server.stop()


@pytest.mark.more
def test_objects_of_a_bucket_are_read_by_pattern_also_in_processes(bucket: Any, tmp_path: Path) -> None:
    for number in range(3):
        bucket(f"train/part-{number}.parquet", make_parquet(40 * number))
        bucket(f"shard-{number:02d}.tar", make_tar(5 * number))
    source = sources.parquet("s3://photos/train/part-*.parquet")
    assert len(source) == 120 and not kept(tmp_path), "footers alone"
    batches = list(Pipeline(source, seed=0).loader(16, epochs=2, workers=1))
    assert sorted(np.concatenate([batch["x"].numpy() for batch in batches]).tolist()) == sorted([*range(120)] * 2)
    assert len(kept(tmp_path)) == 3
    assert sources.tar("s3://photos/shard-{00..02}.tar")[12]["txt"] == b"t12"
    before = Pipeline(source).fingerprint
    assert Pipeline(sources.parquet("s3://photos/train/part-*.parquet")).fingerprint == before
    bucket("train/part-1.parquet", make_parquet(41))
    assert Pipeline(sources.parquet("s3://photos/train/part-*.parquet")).fingerprint != before
    with pytest.raises(PipelineError, match="matches no file"):
        sources.csv("s3://photos/*.csv")
    with pytest.raises(PipelineError, match="no such file"):
        sources.csv("s3://photos/none.csv")
