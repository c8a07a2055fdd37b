"""Serves an artifact over HTTP with Ray Serve; requests that come at the same time are computed as one batch.

ensemble export RUN_DIR digits && python examples/serve.py digits      (needs the extra `serve`)

A request is one sample as JSON, as the program takes it or, of a table, as a row with its columns; with the token
that is printed at the start:
curl -H "Authorization: Bearer TOKEN" -d '{"image": [[[0, 12, ...]]]}' http://127.0.0.1:8000
"""

import argparse
import contextlib
import hmac
import json
import secrets
import signal
from pathlib import Path

import numpy as np
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from ensemble.artifact import ArtifactError, read_record
from ensemble.artifact.preparation import make_preparation
from ensemble.artifact.program import as_outputs, load_program
from ensemble.executors.ray.session import RayConnection, bind_replica
from pipelines import PipelineError

LARGEST_BYTES = 64 << 20


@serve.deployment
class Model:
    """Answers requests by the program of an artifact."""

    prepare = None

    def __init__(self, folder: str, token: str):
        bind_replica()
        torch.set_num_threads(1)
        self.record = read_record(folder)
        self.program = load_program(Path(folder) / "model.pt2")  # refuses one with pickles
        with contextlib.suppress(ArtifactError):  # raised for stages that are functions of the run's
            self.prepare = make_preparation(self.record)
        self.token = f"Bearer {token}".encode()

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.005)
    async def predict(self, samples: list[dict]) -> list[tuple[dict, int]]:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in self.record["fields"]}
        with torch.inference_mode():
            columns = {name: value.tolist() for name, value in as_outputs(self.program(batch)).items()}
        return [({name: column[i] for name, column in columns.items()}, len(samples)) for i in range(len(samples))]

    def read(self, body: bytes) -> dict:
        """The tensors of one sample; raises ValueError for what the program does not take."""
        try:
            given = json.loads(body, parse_constant=refuse_constant)
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        fields = set(self.record["fields"])
        if isinstance(given, dict) and set(given) != fields and self.prepare is not None:
            with contextlib.suppress(KeyError):
                given = {name: np.asarray(value).tolist() for name, value in self.prepare(given).items()}
        if not isinstance(given, dict) or set(given) != fields:
            names = sorted(fields if self.prepare is None else self.prepare.reads)
            raise ValueError(f"the body must be a JSON object with {', '.join(names)}")
        sample = {}
        for name, wanted in self.record["fields"].items():
            try:
                sample[name] = make_tensor(given[name], getattr(torch, wanted["dtype"]))
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise ValueError(f"{name}: {error}") from None
            shape, least = list(sample[name].shape), wanted.get("least")
            if least and len(shape) == 3 and shape[1] >= least[0] and shape[2] >= least[1]:
                top, left = (shape[1] - least[0]) // 2, (shape[2] - least[1]) // 2
                # what the program reads
                sample[name] = sample[name][:, top : top + least[0], left : left + least[1]]
                shape[1:] = wanted["shape"][2:]
            if shape != wanted["shape"][1:]:
                raise ValueError(f"{name} has the shape {shape}, not {wanted['shape'][1:]}")
        return sample

    async def __call__(self, request: Request) -> JSONResponse:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), self.token):
            return JSONResponse({"error": "no token, or a wrong one"}, 401)
        if request.method != "POST":
            return JSONResponse({"error": "POST a sample"}, 405, {"allow": "POST"})
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST_BYTES:
                return JSONResponse({"error": "the sample is too large"}, 413)
        try:
            sample = self.read(bytes(body))
        except (ValueError, PipelineError) as error:
            return JSONResponse({"error": str(error)}, 400)
        answer, size = await self.predict(sample)
        values = answer["values"]
        if not torch.tensor(values).isfinite().all():
            return JSONResponse({"error": "the model gives numbers for this sample that are not finite"}, 422)
        if (
            self.record["classes"]
            and self.record["task"]["kind"] == "classification"
            and isinstance(values[0], float)
        ):
            best = answer.get("decision", max(range(len(values)), key=values.__getitem__))
            answer["class"] = self.record["classes"][best]
        return JSONResponse(answer, headers={"x-batch-size": str(size)})


def refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def make_tensor(given: object, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of numbers; raises ValueError, or what torch raises, for those that the dtype cannot hold."""
    plain = torch.tensor(given)
    if (plain.dtype is torch.bool) != (dtype is torch.bool):
        raise ValueError(f"expected {dtype}, got {plain.dtype}")
    if dtype.is_floating_point:
        made = torch.tensor(given, dtype=torch.float64).to(dtype)
        fits = bool(made.isfinite().all())
    else:
        made = plain.to(dtype)
        fits = not plain.is_floating_point() and torch.equal(made.to(plain.dtype), plain)
    if not fits:
        raise ValueError(f"there is a number that {dtype} cannot hold")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", help="a folder that `ensemble export` wrote")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    token = secrets.token_urlsafe(16)
    # A Ray of its own, on loopback, with a token; or the cluster that RAY_ADDRESS names.
    with contextlib.closing(RayConnection()), contextlib.suppress(KeyboardInterrupt):
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        model = Model.options(num_replicas=options.replicas, ray_actor_options={"num_cpus": 0})
        serve.run(model.bind(str(Path(options.artifact).absolute()), token))
        try:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has set its own
            print(f"http://127.0.0.1:{options.port} token {token}", flush=True)
            signal.pause()
        finally:
            serve.shutdown()


if __name__ == "__main__":
    main()
