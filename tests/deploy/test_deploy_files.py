"""The files in deploy/ are well-formed, refer to what exists, and keep what they promise about authentication."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ensemble.reporting.metrics import DASHBOARD
from ensemble.spec.spec_file import import_file

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kuberay-rayjob.yaml").read_text()))
CLUSTER_FILE = (DEPLOY / "ray-cluster.yaml").read_text()
CLUSTER: dict[str, Any] = yaml.safe_load(CLUSTER_FILE)


def manifests(kind: str) -> list[dict[str, Any]]:
    return [document for document in DOCUMENTS if document["kind"] == kind]


[RAYJOB] = manifests("RayJob")
JOB, RAY = RAYJOB["spec"], RAYJOB["spec"]["rayClusterSpec"]
GROUPS: list[dict[str, Any]] = [RAY["headGroupSpec"], *RAY["workerGroupSpecs"]]
RAY_PODS = [group["template"]["spec"] for group in GROUPS]
TEMPLATES = [JOB["submitterPodTemplate"], *(group["template"] for group in GROUPS)]


def gibibytes(quantity: str) -> float:
    found = re.fullmatch(r"(\d+)(Mi|Gi)", quantity)
    assert found is not None, quantity
    return int(found[1]) / {"Mi": 1024, "Gi": 1}[found[2]]


def test_the_image_copies_only_what_exists_has_the_locks_versions_and_runs_as_an_ordinary_user() -> None:
    text = re.sub(r"(?m)^#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line.strip()]
    sources = [word for line in lines if line[0] == "COPY" for word in line[1:-1]]
    assert {"pipelines", "ensemble", "examples"} <= set(sources)
    assert [name for name in sources if not (ROOT / name).exists()] == []
    installs = [" ".join(line) for line in lines if line[0] == "RUN" and "install" in line and "pip" in line]
    of_lock, of_package = installs
    assert "--no-deps --index-url" in of_lock and of_lock.endswith("--require-hashes -r requirements.lock")
    assert "--no-deps --no-build-isolation . && pip check" in of_package
    awk = ["awk", of_lock.split("'")[3], DEPLOY / "requirements.lock"]
    without_torch = subprocess.run(awk, capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"(?m)^([\w-]+)==", without_torch))
    assert {"numpy", "nvidia-ml-py", "ray", "torchmetrics"} <= names and "sha256:" in without_torch
    assert not {"torch", "torchvision", "triton", "cuda-toolkit", "nvidia-nccl-cu13"} & names
    assert not any("extra-index-url" in line for line in installs), "whoever claims the highest version would win"
    assert re.fullmatch(r"python:3\.11-slim@sha256:[0-9a-f]{64}", lines[0][1])
    assert [line[1] for line in lines if line[0] == "USER"][-1] not in ("root", "0")


def test_the_job_reads_and_writes_where_every_pod_sees_it() -> None:
    words = shlex.split(JOB["entrypoint"])
    assert words[:2] == ["ensemble", "run"] and words[2].startswith("examples/")  # which the image holds
    run_dir = words[words.index("--run-dir") + 1]
    name, _, data = words[words.index("--set") + 1].partition("=")
    assert name in inspect.signature(import_file(ROOT / words[2]).spec).parameters
    claims = {claim["metadata"]["name"]: claim["spec"] for claim in manifests("PersistentVolumeClaim")}
    claimed = set[str]()
    for pod in RAY_PODS:
        volumes = [v for v in pod["volumes"] if "emptyDir" not in v]
        claimed |= {volume["persistentVolumeClaim"]["claimName"] for volume in volumes}
        own = {volume["name"] for volume in volumes}
        mounts = [m for c in pod["containers"] for m in c["volumeMounts"] if m["name"] in own]
        writable = {f"{m['mountPath']}/": not m.get("readOnly", False) for m in mounts}
        assert [writes for path, writes in writable.items() if run_dir.startswith(path)] == [True]
        assert [writes for path, writes in writable.items() if data.startswith(path)] == [False]
    assert claimed == set(claims)
    assert all(claims[name]["accessModes"] == ["ReadWriteMany"] for name in claimed), "else data stays empty"
    text = (DEPLOY / "README.md").read_text()
    filling = json.loads(text.partition("--overrides='")[2].partition("'")[0])["spec"]
    (volume,) = filling["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": "ensemble-data"}
    assert filling["containers"][0]["volumeMounts"] == [{"name": volume["name"], "mountPath": "/data"}]


def test_the_job_ends_with_its_cluster_and_only_a_lost_head_is_retried() -> None:
    assert "--allow-failed" in shlex.split(JOB["entrypoint"]), "KubeRay would start a cluster for each retry"
    assert JOB["backoffLimit"] > 0
    assert JOB["shutdownAfterJobFinishes"] is True
    assert JOB["activeDeadlineSeconds"] > JOB["ttlSecondsAfterFinished"] > 0
    assert JOB["submitterPodTemplate"]["spec"]["restartPolicy"] == "Never"


def test_the_cluster_of_the_job_is_of_the_installed_ray_with_options_that_it_knows_and_asks_for_tokens() -> None:
    from ray.scripts.scripts import start as ray_start

    assert RAYJOB["apiVersion"] == "ray.io/v1" and RAY["authOptions"] == {"mode": "token"}
    assert f"ray=={RAY['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    known = {name for each in ray_start.params for name in each.opts}
    for group in GROUPS:
        # KubeRay makes options of `ray start` from them, which takes text.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert {f"--{option}" for option in group["rayStartParams"]} <= known
    for group in RAY["workerGroupSpecs"]:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]


def test_the_pods_run_one_image_satisfy_the_restricted_standard_and_hold_no_token_of_kubernetes() -> None:
    pods = [template["spec"] for template in TEMPLATES]
    [image] = {container["image"] for pod in pods for container in pod["containers"]}
    assert re.fullmatch(r"[^:@]+@sha256:[0-9a-f]{64}", image), "which no push can replace"
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(container["securityContext"] == restricted for container in pod["containers"])


def test_shared_memory_is_limited_to_a_part_of_the_memory_of_the_pod() -> None:
    for pod in RAY_PODS:
        [container] = pod["containers"]
        [mount] = [m for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        [volume] = [v for v in pod["volumes"] if v["name"] == mount["name"]]
        resources, directory = container["resources"], volume["emptyDir"]
        assert directory["medium"] == "Memory" and resources["requests"] == resources["limits"]
        assert 0 < gibibytes(directory["sizeLimit"]) < gibibytes(resources["limits"]["memory"])


def test_only_the_pods_of_the_job_and_the_operator_reach_ray() -> None:
    [policy] = [document["spec"] for document in manifests("NetworkPolicy")]
    own = policy["podSelector"]["matchLabels"]
    assert all(own.items() <= template["metadata"]["labels"].items() for template in TEMPLATES)
    operator = {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}
    among_own, from_operator = policy["ingress"]
    assert policy["policyTypes"] == ["Ingress"] and among_own == {"from": [{"podSelector": {"matchLabels": own}}]}
    assert from_operator["ports"] == [{"port": 8265, "protocol": "TCP"}]
    [peer] = from_operator["from"]
    assert peer["podSelector"] == operator


def test_the_cluster_file_copies_what_exists_and_satisfies_the_schema_of_ray_up_with_its_cloud_block_too() -> None:
    block = CLUSTER_FILE[CLUSTER_FILE.index("# provider:") :].splitlines()
    cloud = yaml.safe_load("\n".join(line.removeprefix("# ") for line in block if not line.startswith("# setup_")))
    whole = {**CLUSTER, **cloud}
    package = find_spec("ray")
    assert package is not None and package.origin is not None
    schema = json.loads((Path(package.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    for config in (CLUSTER, whole):
        jsonschema.validate(config, schema)
    assert whole["head_node_type"] in whole["available_node_types"]
    local = [path for path in CLUSTER["file_mounts"].values() if not path.startswith("~")]
    assert [path for path in local if not (ROOT / path).exists()] == []


def test_every_ray_process_of_the_cluster_file_asks_for_the_token_and_writes_where_only_its_user_gets() -> None:
    commands = [each for kind in ("head", "worker") for each in CLUSTER[f"{kind}_start_ray_commands"]]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2 and all(command.startswith("RAY_AUTH_MODE=token ") for command in starts)
    assert "~/.ray/auth_token" in CLUSTER["file_mounts"]
    starts = re.findall(r"\bray start -.*\n.*\n.*", CLUSTER_FILE)
    [made] = re.findall(r"install -d -m 700 ([^\n]+)", CLUSTER_FILE)
    assert starts and all(re.search(rf"--temp-dir={re.escape(made)}/\w", start) for start in starts)


@pytest.mark.parametrize("script", ["deploy/slurm.sbatch", ".ci/run"])
def test_scripts_are_valid_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_slurm_reads_all_directives_of_its_job_which_runs_an_example_and_keeps_its_token_to_the_user() -> None:
    """Slurm stops looking at the first line that is neither empty nor a comment."""
    text = (DEPLOY / "slurm.sbatch").read_text()
    lines = text.splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives and max(directives) < first_command
    default = re.search(r"spec=\$\{1:-(\S+)\}", text)
    assert default is not None and (ROOT / default[1]).is_file()
    assert "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN\n" in text
    assert "$RAY_AUTH_TOKEN" not in text, "every user of a node sees command lines"


def test_the_readme_names_every_file_and_rays_versions_and_the_dashboard_is_the_one_that_ray_is_given() -> None:
    text = (DEPLOY / "README.md").read_text()
    names = {path.name for path in DEPLOY.iterdir()} - {"README.md", "Dockerfile.dockerignore"}
    assert [name for name in names if name not in text] == []
    [ray] = re.findall(r'"(ray\[default\][^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert f"`{ray}`" in text, "the versions of Ray that it may be"
    dashboard = DEPLOY / "grafana" / "ensemble.json"
    assert dashboard.read_text() == DASHBOARD.read_text()
    assert not dashboard.is_symlink(), "it is to be mounted and downloaded alone"
