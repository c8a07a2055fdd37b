"""Serves an artifact over HTTP with Ray Serve; requests that come at the same time are computed as one batch.

ensemble export RUN_DIR digits && python examples/serve.py digits      (needs the extra `serve`)

A request is one sample as JSON, with the token that is printed at the start:
curl -H "Authorization: Bearer TOKEN" -d '{"image": [[[0, 12, ...]]]}' http://127.0.0.1:8000
"""

import argparse
import contextlib
import hmac
import json
import secrets
import signal
from pathlib import Path

import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from ensemble.artifact import read_record
from ensemble.artifact.program import load_program
from ensemble.executors.ray.session import RayConnection, bind_replica

LARGEST_BYTES = 64 << 20


@serve.deployment
class Model:
    """Answers requests by the program of an artifact."""

    def __init__(self, folder: str, token: str):
        bind_replica()
        torch.set_num_threads(1)
        self.record = read_record(folder)
        self.program = load_program(Path(folder) / "model.pt2")  # refuses one with pickles
        self.token = f"Bearer {token}".encode()

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.005)
    async def predict(self, samples: list[dict]) -> list[tuple[list, int]]:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in self.record["fields"]}
        with torch.inference_mode():
            return [(values, len(samples)) for values in self.program(batch).tolist()]

    def read(self, body: bytes) -> dict:
        """The tensors of one sample; raises ValueError for what the program does not take."""
        try:
            given = json.loads(body, parse_constant=refuse_constant)
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        if not isinstance(given, dict) or set(given) != set(self.record["fields"]):
            raise ValueError(f"the body must be a JSON object with {', '.join(self.record['fields'])}")
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
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        values, size = await self.predict(sample)
        if not torch.tensor(values).isfinite().all():
            return JSONResponse({"error": "the model gives numbers for this sample that are not finite"}, 422)
        answer = {"values": values}
        if (
            self.record["classes"]
            and self.record["task"]["kind"] == "classification"
            and isinstance(values[0], float)
        ):
            answer["class"] = self.record["classes"][max(range(len(values)), key=values.__getitem__)]
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
