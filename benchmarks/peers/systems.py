"""The systems, each as its documentation shows it: the batches that one member reads. Runs in their environment.

`python -m benchmarks.peers.systems '{"system": ..., ...}'` is a member, the server of members, or writes the data.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.peers.training import BATCH, SIDE, Photographs, prepare, train

TF_PORT = 15600
PORTS = {"port": 15555, "ack_port": 15556, "heart_ports": (14444, 14445)}
Options = dict[str, Any]


def dataloader(options: Options) -> Iterator[Any]:
    """A DataLoader of torch with one worker for each member, which stays."""
    data = Photographs(options["data"])
    loader: DataLoader[Any] = DataLoader(
        data, BATCH, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True
    )
    for _ in range(options["epochs"]):
        yield from loader


def tensorsocket(options: Options) -> Iterator[Any]:
    """TensorSocket: what `serve_tensorsocket` prepares for all members."""
    from tensorsocket import TensorConsumer

    consumer = TensorConsumer(**PORTS, batch_size=BATCH)
    for _ in range(options["epochs"]):
        yield from consumer


def serve_tensorsocket(options: Options) -> None:
    """TensorSocket's producer around the DataLoader; it is ended when all members are.

    It puts batches of its loader together, at least two: with one (0.0.5) it fails.
    """
    from tensorsocket import TensorProducer

    data, parts = Photographs(options["data"]), 4
    loader: DataLoader[Any] = DataLoader(
        data, BATCH // parts, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True
    )
    producer = TensorProducer(loader, **PORTS, producer_batch_size=parts)
    while True:
        for _ in producer:
            pass


def spdl(options: Options) -> Iterator[Any]:
    """SPDL: a pipeline of threads for each member."""
    from spdl.pipeline import PipelineBuilder

    data, rng = Photographs(options["data"]), np.random.default_rng(options["number"])

    def load(number: int) -> tuple[torch.Tensor, int]:
        content, label = data.read(number)
        return torch.from_numpy(prepare(content, np.random.default_rng(int(rng.integers(2**31))))), label

    def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])

    for _ in range(options["epochs"]):
        order = map(int, rng.permutation(len(data)))
        builder = PipelineBuilder().add_source(order).pipe(load, concurrency=1)
        pipeline = builder.aggregate(BATCH, drop_last=True).pipe(collate).add_sink(4).build(num_threads=1)
        with pipeline.auto_stop():
            yield from pipeline


def grain(options: Options) -> Iterator[Any]:
    """Grain: a MapDataset with one worker process for each member."""
    import grain as gr

    data = Photographs(options["data"])

    def load(number: int, rng: np.random.Generator) -> dict[str, Any]:
        content, label = data.read(number)
        return {"image": prepare(content, rng), "label": label}

    dataset = gr.MapDataset.range(len(data)).shuffle(seed=options["number"]).random_map(load, seed=0)
    batches = dataset.batch(BATCH, drop_remainder=True).repeat(options["epochs"]).to_iter_dataset()
    for batch in batches.mp_prefetch(gr.multiprocessing.MultiprocessingOptions(num_workers=1)):
        yield torch.from_numpy(batch["image"]), torch.from_numpy(np.asarray(batch["label"]))


def write_litdata(options: Options) -> None:
    """The photographs in litdata's chunks."""
    from litdata import optimize

    data = Photographs(options["data"])
    optimize(data.read, list(range(len(data))), options["folder"], chunk_bytes="64MB", num_workers=1)


def litdata(options: Options) -> Iterator[Any]:
    """litdata: a StreamingDataset with one worker for each member."""
    from litdata import StreamingDataLoader, StreamingDataset

    class Prepared(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            content, label = super().__getitem__(index)
            return prepare(content, np.random.default_rng(int(torch.randint(2**31, ())))), label

    dataset = Prepared(options["folder"], shuffle=True, drop_last=True)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=1, persistent_workers=True, drop_last=True)
    for _ in range(options["epochs"]):
        yield from loader


def write_streaming(options: Options) -> None:
    """The photographs in shards of MosaicML Streaming."""
    from streaming import MDSWriter

    data = Photographs(options["data"])
    with MDSWriter(out=options["folder"], columns={"image": "bytes", "label": "int"}) as shards:
        for number in range(len(data)):
            content, label = data.read(number)
            shards.write({"image": content, "label": label})


def streaming(options: Options) -> Iterator[Any]:
    """MosaicML Streaming: a StreamingDataset with one worker for each member."""
    from streaming import StreamingDataset

    class Prepared(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            rng = np.random.default_rng(int(torch.randint(2**31, ())))
            return torch.from_numpy(prepare(sample["image"], rng)), sample["label"]

    dataset = Prepared(local=options["folder"], shuffle=True, batch_size=BATCH)
    loader: DataLoader[Any] = DataLoader(dataset, BATCH, num_workers=1, persistent_workers=True, drop_last=True)
    for _ in range(options["epochs"]):
        yield from loader


def write_tfdata(options: Options) -> None:
    """The photographs as TFRecords."""
    import tensorflow as tf

    data = Photographs(options["data"])
    with tf.io.TFRecordWriter(options["folder"]) as records:
        for number in range(len(data)):
            content, label = data.read(number)
            image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[content]))
            label = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
            features = tf.train.Features(feature={"image": image, "label": label})
            records.write(tf.train.Example(features=features).SerializeToString())


def serve_tfdata(options: Options) -> None:
    """The dispatcher of tf.data service and one worker; they are ended when all members are."""
    from tensorflow.data.experimental import service

    dispatcher = service.DispatchServer(service.DispatcherConfig(port=TF_PORT))
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=f"localhost:{TF_PORT}"))
    worker.join()
    dispatcher.join()


def tfdata(options: Options) -> Iterator[Any]:
    """tf.data service: its worker keeps for all trainers what TensorFlow's own operations have prepared."""
    import tensorflow as tf
    from tensorflow.data.experimental import service

    kinds = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def load(record: Any) -> Any:
        sample = tf.io.parse_single_example(record, kinds)
        image = tf.io.decode_jpeg(sample["image"], channels=3)
        shape = tf.shape(image)
        side = tf.cast(
            tf.cast(tf.minimum(shape[0], shape[1]), tf.float32) * tf.random.uniform([], 0.6, 1.0), tf.int32
        )
        small = tf.image.resize(tf.image.random_crop(image, [side, side, 3]), [SIDE, SIDE])
        return tf.transpose(tf.image.random_flip_left_right(small), [2, 0, 1]) / 127.5 - 1.0, sample["label"]

    records = tf.data.TFRecordDataset(options["folder"]).repeat().shuffle(1000)
    batches = records.map(load, num_parallel_calls=1).batch(BATCH, drop_remainder=True)
    cache = service.CrossTrainerCache(trainer_id=str(options["number"]))
    shared = service.distribute(
        service.ShardingPolicy.OFF, f"grpc://localhost:{TF_PORT}", job_name="peers", cross_trainer_cache=cache
    )
    for images, labels in batches.apply(shared).as_numpy_iterator():
        yield torch.from_numpy(images), torch.from_numpy(labels)


#: What of a system has to be installed, beside torch; what writes its own format; what serves all members.
PACKAGES = {
    "tensorsocket": "tensorsocket==0.0.5",
    "tfdata": "tensorflow-cpu==2.21.0",
    "spdl": "spdl==0.8.0",
    "grain": "grain==0.2.18",
    "litdata": "litdata==0.2.76",
    "streaming": "mosaicml-streaming==0.13.0",
}
READERS: dict[str, Callable[[Options], Iterator[Any]]] = {
    "dataloader": dataloader,
    "tensorsocket": tensorsocket,
    "tfdata": tfdata,
    "spdl": spdl,
    "grain": grain,
    "litdata": litdata,
    "streaming": streaming,
}
WRITERS = {"tfdata": write_tfdata, "litdata": write_litdata, "streaming": write_streaming}
SERVERS = {"tensorsocket": serve_tensorsocket, "tfdata": serve_tfdata}


def main(options: Options) -> None:
    """Do one process's part; a member prints what `train` returns as JSON."""
    if "do" in options:
        (WRITERS if options["do"] == "write" else SERVERS)[options["system"]](options)
        return
    time.sleep(options["delay_s"])
    most = options["epochs"] * (len(Photographs(options["data"])) // BATCH)
    batches = itertools.islice(READERS[options["system"]](options), most)
    result = train(batches, options["width"], options["classes"], options["lr"])
    Path(options["out"]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # threads of TensorSocket's consumer would keep the process


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
