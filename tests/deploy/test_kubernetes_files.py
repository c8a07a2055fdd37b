"""The manifests in deploy/ have the fields that Kubernetes, KubeRay and Kueue know, and fit each other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "how-to" / "users-of-a-cluster.md"
FIELDS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("kubernetes_fields.yaml").read_text())
METADATA = {"name": "string", "namespace": "string", "labels": {"*": "string"}}
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"


def to_schema(field: Any) -> dict[str, Any]:
    if isinstance(field, list):
        return {"type": "array", "items": to_schema(field[0])}
    if isinstance(field, str) and field.startswith("@"):
        return to_schema(FIELDS[field])
    if isinstance(field, str) and "|" in field:
        return {"enum": field.split("|")}
    if isinstance(field, str):
        return {"type": ["string", "number"] if field == "quantity" else field}
    if "*" in field:
        return {"type": "object", "additionalProperties": to_schema(field["*"])}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name.removesuffix("!"): to_schema(each) for name, each in field.items()},
        "required": [name.removesuffix("!") for name in field if name.endswith("!")],
    }


def rayjob_file(*kinds: str) -> str:
    """The file with the RayJob, as the page's `sed` makes it with the lines of these kinds."""
    text = (DEPLOY / "kuberay-rayjob.yaml").read_text()
    for kind in kinds:
        [command] = {each for each in re.findall(r"sed '[^']*'", PAGE.read_text()) if f"#{kind} " in each}
        text = subprocess.run(["sh", "-c", command], input=text, capture_output=True, text=True, check=True).stdout
    return text


def read(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def select(documents: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def amount(quantity: str | int) -> float:
    number, unit = re.fullmatch(r"(\d+)(m|Mi|Gi)?", str(quantity)).groups()  # type: ignore[union-attr]
    return int(number) / {None: 1, "m": 1000, "Gi": 1, "Mi": 1024}[unit]


KUEUE, TEAM = (read((DEPLOY / name).read_text()) for name in ("kueue.yaml", "kubernetes-team.yaml"))


@pytest.mark.parametrize("documents", [read(rayjob_file()), read(rayjob_file("kueue", "tls")), KUEUE, TEAM])
def test_the_servers_know_all_fields(documents: list[dict[str, Any]]) -> None:
    for document in documents:
        fields = FIELDS[f"{document['apiVersion']} {document['kind']}"]
        usual = {"apiVersion!": "string", "kind!": "string", "metadata!": METADATA}
        jsonschema.validate(document, to_schema({**usual, **fields}))


def test_the_job_waits_in_a_queue_that_admits_its_namespace_and_has_room_for_it() -> None:
    [job] = select(read(rayjob_file("kueue")), "RayJob").values()
    labels, spec = job["metadata"]["labels"], job["spec"]
    assert labels[PRIORITY] in select(KUEUE, "WorkloadPriorityClass")
    [team] = select(TEAM, "Namespace")
    where = {"name": labels[QUEUE], "namespace": team}
    [local] = [each for each in KUEUE if each["kind"] == "LocalQueue" and each["metadata"] == where]
    queue = select(KUEUE, "ClusterQueue")[local["spec"]["clusterQueue"]]["spec"]
    assert queue["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": team}}
    [group] = queue["resourceGroups"]
    [flavor] = group["flavors"]
    assert flavor["name"] in select(KUEUE, "ResourceFlavor")
    quota = {each["name"]: amount(each["nominalQuota"]) for each in flavor["resources"]}
    cluster = spec["rayClusterSpec"]
    groups = [(1, cluster["headGroupSpec"]["template"]), (1, spec["submitterPodTemplate"])]
    groups += [(each["replicas"], each["template"]) for each in cluster["workerGroupSpecs"]]
    needs: dict[str, float] = {}
    for count, template in groups:
        for container in template["spec"]["containers"]:
            for name, quantity in container["resources"]["requests"].items():
                needs[name] = needs.get(name, 0.0) + count * amount(quantity)
    assert set(needs) == set(quota) == set(group["coveredResources"]), "Kueue admits no job with others"
    assert all(needs[name] <= quota[name] < 2 * needs[name] for name in quota), (
        "one run fits, and a second one waits"
    )
    assert spec["suspend"] is True and spec["shutdownAfterJobFinishes"] is True
    assert not cluster.get("enableInTreeAutoscaling"), "Kueue refuses it unless elastic jobs are switched on"


def test_what_a_queue_may_borrow_does_not_meet_the_cap_of_its_namespace() -> None:
    [cap] = [each["spec"]["hard"] for each in select(TEAM, "ResourceQuota").values()]
    for resource in ("cpu", "memory"):
        groups = [g for queue in select(KUEUE, "ClusterQueue").values() for g in queue["spec"]["resourceGroups"]]
        offered = [each for group in groups for flavor in group["flavors"] for each in flavor["resources"]]
        quotas = [amount(each["nominalQuota"]) for each in offered if each["name"] == resource]
        assert len(quotas) == 2 and amount(cap[f"requests.{resource}"]) >= sum(quotas)


def test_nothing_reaches_a_teams_pods_but_what_the_job_admits() -> None:
    [policy] = select(TEAM, "NetworkPolicy").values()
    assert policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    assert {each["metadata"].get("namespace", each["metadata"]["name"]) for each in TEAM} == {"vision"}
    assert not any("namespace" in each["metadata"] for each in read(rayjob_file("kueue")))


def test_another_teams_namespace_is_made_as_the_page_says() -> None:
    [command] = re.findall(r"(sed 's/vision/.*') deploy/kubernetes-team\.yaml", PAGE.read_text())
    text = (DEPLOY / "kubernetes-team.yaml").read_text()
    made = subprocess.run(["sh", "-c", command], input=text, capture_output=True, text=True, check=True).stdout
    assert "vision" not in str(read(made))
    teams = {*select(TEAM, "Namespace"), *select(read(made), "Namespace")}
    assert {each["metadata"]["namespace"] for each in KUEUE if each["kind"] == "LocalQueue"} == teams
