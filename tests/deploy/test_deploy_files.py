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


def pinned(package: str) -> str:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return pins[package]


def dockerfile() -> list[list[str]]:
    """The instructions, as words; continued lines are joined and comments left out."""
    text = re.sub(r"(?m)^#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip()]


def manifests(kind: str) -> list[dict[str, Any]]:
    documents = yaml.safe_load_all((DEPLOY / "kuberay-rayjob.yaml").read_text())
    return [document for document in documents if document["kind"] == kind]


def rayjob() -> dict[str, Any]:
    [job] = manifests("RayJob")
    return job


def ray_pods() -> list[dict[str, Any]]:
    """The templates of the pods in which Ray runs, head first."""
    cluster = rayjob()["spec"]["rayClusterSpec"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def all_pods() -> list[dict[str, Any]]:
    """The templates of all pods of the RayJob."""
    return [rayjob()["spec"]["submitterPodTemplate"], *ray_pods()]


def gibibytes(quantity: str) -> float:
    """A quantity of memory as Kubernetes writes it."""
    found = re.fullmatch(r"(\d+)(Mi|Gi)", quantity)
    assert found is not None, quantity
    return int(found[1]) / {"Mi": 1024, "Gi": 1}[found[2]]


def cluster() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    return config


def test_the_image_copies_only_what_exists() -> None:
    sources = [word for line in dockerfile() if line[0] == "COPY" for word in line[1:-1]]
    assert {"pipelines", "ensemble", "examples"} <= set(sources)
    assert [name for name in sources if not (ROOT / name).exists()] == []


def test_the_image_installs_pinned_versions_and_runs_as_an_ordinary_user() -> None:
    lines = dockerfile()
    installs = [" ".join(line) for line in lines if line[0] == "RUN" and "install" in line and "pip" in line]
    of_torch, of_all = installs[:2]
    assert "--no-deps --index-url" in of_torch and "grep ^torch== constraints.txt" in of_torch
    assert "-c constraints.txt" in of_all
    assert not any("extra-index-url" in line for line in installs), "whoever claims the highest version would win"
    assert re.fullmatch(r"python:3\.11-slim@sha256:[0-9a-f]{64}", lines[0][1])
    assert [line[1] for line in lines if line[0] == "USER"][-1] not in ("root", "0")


def test_the_job_reads_and_writes_where_every_pod_sees_it() -> None:
    words = shlex.split(rayjob()["spec"]["entrypoint"])
    assert words[:2] == ["ensemble", "run"] and words[2].startswith("examples/")  # which the image holds
    run_dir = words[words.index("--run-dir") + 1]
    name, _, data = words[words.index("--set") + 1].partition("=")
    assert name in inspect.signature(import_file(ROOT / words[2]).spec).parameters
    for pod in (template["spec"] for template in ray_pods()):
        claims = {v["name"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
        mounts = [m for c in pod["containers"] for m in c["volumeMounts"] if m["name"] in claims]
        writable = {f"{m['mountPath']}/": not m.get("readOnly", False) for m in mounts}
        assert [writes for path, writes in writable.items() if run_dir.startswith(path)] == [True]
        assert [writes for path, writes in writable.items() if data.startswith(path)] == [False]


def test_the_claims_of_the_job_are_declared_and_shared_between_nodes() -> None:
    claims = {claim["metadata"]["name"]: claim["spec"] for claim in manifests("PersistentVolumeClaim")}
    volumes = [v["persistentVolumeClaim"] for t in ray_pods() for v in t["spec"]["volumes"] if "emptyDir" not in v]
    assert {volume["claimName"] for volume in volumes} == set(claims)
    for volume in volumes:
        assert claims[volume["claimName"]]["accessModes"] == ["ReadWriteMany"], (
            "what may never be written stays empty"
        )


def test_the_pod_that_fills_the_data_mounts_its_claim_for_writing() -> None:
    text = (DEPLOY / "README.md").read_text()
    pod = json.loads(text.partition("--overrides='")[2].partition("'")[0])["spec"]
    (volume,) = pod["volumes"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    assert volume["persistentVolumeClaim"] == {"claimName": "ensemble-data"}
    assert mount == {"name": volume["name"], "mountPath": "/data"}


def test_a_run_with_failed_members_is_not_retried_and_a_lost_head_is() -> None:
    spec = rayjob()["spec"]
    words = shlex.split(spec["entrypoint"])
    assert "--allow-failed" in words, (
        "KubeRay takes the exit status 3 for a failure, and starts a cluster for each retry"
    )
    assert spec["backoffLimit"] > 0


def test_the_job_ends_and_its_cluster_is_removed() -> None:
    spec = rayjob()["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert all(isinstance(spec[name], int) for name in ("activeDeadlineSeconds", "ttlSecondsAfterFinished"))
    assert spec["activeDeadlineSeconds"] > spec["ttlSecondsAfterFinished"] > 0
    assert spec["submitterPodTemplate"]["spec"]["restartPolicy"] == "Never"


def test_the_groups_of_the_job_have_one_size_and_options_that_ray_knows() -> None:
    from ray.scripts.scripts import start as ray_start

    cluster = rayjob()["spec"]["rayClusterSpec"]
    for group in cluster["workerGroupSpecs"]:
        assert len({group[name] for name in ("replicas", "minReplicas", "maxReplicas")}) == 1
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        # KubeRay makes options of `ray start` from them, which takes text.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        for option in group["rayStartParams"]:
            assert f"--{option}" in {name for each in ray_start.params for name in each.opts}


def test_the_job_names_the_version_of_ray_that_is_installed_and_asks_for_tokens() -> None:
    spec = rayjob()["spec"]["rayClusterSpec"]
    assert rayjob()["apiVersion"] == "ray.io/v1"
    assert spec["rayVersion"] == pinned("ray")
    assert spec["authOptions"] == {"mode": "token"}


def test_all_pods_run_one_image_which_no_push_can_replace() -> None:
    [image] = {c["image"] for template in all_pods() for c in template["spec"]["containers"]}
    assert re.fullmatch(r"[^:@]+@sha256:[0-9a-f]{64}", image)


def test_the_pods_satisfy_the_restricted_pod_security_standard_and_hold_no_token_of_kubernetes() -> None:
    for pod in (template["spec"] for template in all_pods()):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_shared_memory_is_limited_to_a_part_of_the_memory_of_the_pod() -> None:
    for pod in (template["spec"] for template in ray_pods()):
        [container] = pod["containers"]
        [mount] = [m for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        [volume] = [v for v in pod["volumes"] if v["name"] == mount["name"]]
        assert volume["emptyDir"]["medium"] == "Memory"
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert 0 < gibibytes(volume["emptyDir"]["sizeLimit"]) < gibibytes(resources["limits"]["memory"])


def test_only_the_pods_of_the_job_and_the_operator_reach_ray() -> None:
    [policy] = [document["spec"] for document in manifests("NetworkPolicy")]
    own = policy["podSelector"]["matchLabels"]
    for template in all_pods():
        assert own.items() <= template["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    among_own, from_operator = policy["ingress"]
    assert among_own == {"from": [{"podSelector": {"matchLabels": own}}]}
    assert from_operator["ports"] == [{"port": 8265, "protocol": "TCP"}]
    [peer] = from_operator["from"]
    assert peer["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}


def test_the_cluster_file_satisfies_the_schema_of_ray_up_as_it_is_and_with_its_cloud_block() -> None:
    text = (DEPLOY / "ray-cluster.yaml").read_text()
    block = text[text.index("# provider:") :].splitlines()
    cloud = yaml.safe_load("\n".join(line.removeprefix("# ") for line in block if not line.startswith("# setup_")))
    whole = {**cluster(), **cloud}
    package = find_spec("ray")
    assert package is not None and package.origin is not None
    schema = json.loads((Path(package.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    for config in (cluster(), whole):
        jsonschema.validate(config, schema)
    assert whole["head_node_type"] in whole["available_node_types"]


def test_the_cluster_file_copies_what_exists() -> None:
    local = [path for path in cluster()["file_mounts"].values() if not path.startswith("~")]
    assert [path for path in local if not (ROOT / path).exists()] == []


def test_every_ray_process_of_the_cluster_file_asks_for_the_token() -> None:
    config = cluster()
    starts = [
        command
        for kind in ("head", "worker")
        for command in config[f"{kind}_start_ray_commands"]
        if "ray start" in command
    ]
    assert len(starts) == 2
    assert all(command.startswith("RAY_AUTH_MODE=token ") for command in starts)
    assert "~/.ray/auth_token" in config["file_mounts"]


def test_other_users_of_a_machine_do_not_get_to_what_ray_lets_everybody_write() -> None:
    text = (DEPLOY / "ray-cluster.yaml").read_text()
    starts = re.findall(r"\bray start -.*\n.*\n.*", text)
    [made] = re.findall(r"install -d -m 700 ([^\n]+)", text)
    assert starts and all(re.search(rf"--temp-dir={re.escape(made)}/\w", start) for start in starts)


@pytest.mark.parametrize("script", ["deploy/slurm.sbatch", ".ci/run"])
def test_scripts_are_valid_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_slurm_reads_all_of_its_directives() -> None:
    """Slurm stops looking at the first line that is neither empty nor a comment."""
    lines = (DEPLOY / "slurm.sbatch").read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives and max(directives) < first_command


def test_the_slurm_job_runs_an_example_and_keeps_its_token_to_the_user() -> None:
    text = (DEPLOY / "slurm.sbatch").read_text()
    default = re.search(r"spec=\$\{1:-(\S+)\}", text)
    assert default is not None and (ROOT / default[1]).is_file()
    assert "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN\n" in text
    assert "$RAY_AUTH_TOKEN" not in text, "every user of a node sees command lines"


def test_the_readme_speaks_of_every_file() -> None:
    text = (DEPLOY / "README.md").read_text()
    names = {path.name for path in DEPLOY.iterdir()} - {"README.md", "Dockerfile.dockerignore"}
    assert [name for name in names if name not in text] == []


def test_the_dashboard_for_grafana_is_the_one_that_ray_is_given() -> None:
    assert (DEPLOY / "grafana" / "ensemble.json").read_text() == DASHBOARD.read_text()
    assert not (DEPLOY / "grafana" / "ensemble.json").is_symlink(), "it is to be mounted and downloaded alone"
