"""The manifest for KubeRay: of the shape its operator reads, as we ship it, with no secret in it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from keystroke.config import NamedModel, Settings, load_settings
from keystroke.scale.kuberay import RESOURCE, documents, render_manifest

jsonschema = pytest.importorskip("jsonschema", reason="comes with the [scale] extra")

SHIPPED = Path(__file__).parents[2] / "deploy" / "kuberay.yaml"
TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}


def shape(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object of these fields and no others: a field the operator does not know is a mistake."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


LABELS = {"type": "object", "additionalProperties": TEXT}
NAMED = shape({"name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}}, {"labels": LABELS})
POD = shape(
    {
        "spec": {
            "type": "object",
            "required": ["containers"],
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "object", "required": ["name", "image"]},
                }
            },
        }
    },
    {"metadata": shape({"labels": LABELS})},
)
# Ray's own command line takes every parameter as text.
START = {"type": "object", "additionalProperties": {"type": "string"}}
HEAD = shape({"rayStartParams": START, "template": POD})
GROUP = shape(
    {
        "groupName": TEXT,
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "rayStartParams": START,
        "template": POD,
    }
)
SPECS = {
    "RayCluster": shape(
        {"rayVersion": TEXT, "headGroupSpec": HEAD, "workerGroupSpecs": {"type": "array", "items": GROUP}},
        {
            "enableInTreeAutoscaling": {"type": "boolean"},
            "authOptions": shape({"mode": {"enum": ["disabled", "token"]}}),
        },
    ),
    "RayJob": shape(
        {"entrypoint": TEXT, "clusterSelector": LABELS},
        {"submitterPodTemplate": POD},
    ),
}
VERSIONS = {
    "RayCluster": "ray.io/v1",
    "RayJob": "ray.io/v1",
    "ConfigMap": "v1",
    "Service": "v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}


def plain() -> Settings:
    return load_settings(environ={}, cwd=Path("/"))


@pytest.fixture(params=["default", "pools"])
def settings(request: pytest.FixtureRequest) -> Settings:
    if request.param == "default":
        return plain()
    fast = NamedModel(replicas=4, max_replicas=12, gpus=1.0, requests_per_minute=600)
    deep = NamedModel(role="deep", gpus=1.0)
    away = NamedModel(role="chat", engine="remote", base_url="https://models.example/v1", model="m")
    return replace(plain(), models={"coder": fast, "Big.One": deep, "away": away})


def test_every_document_is_of_a_shape_its_operator_reads(settings: Settings) -> None:
    made = list(yaml.safe_load_all(render_manifest(settings, "keystroke:1")))
    assert {d["kind"] for d in made} == set(VERSIONS)
    for document in made:
        assert document["apiVersion"] == VERSIONS[document["kind"]]
        jsonschema.validate(document["metadata"], NAMED)
        if document["kind"] in SPECS:
            jsonschema.validate(document["spec"], SPECS[document["kind"]])


def test_only_pods_of_the_cluster_and_its_operator_reach_ray(settings: Settings) -> None:
    made = {d["kind"]: d for d in documents(settings, "keystroke:1")}
    assert made["RayCluster"]["spec"]["authOptions"] == {"mode": "token"}
    ours, operator, anybody = made["NetworkPolicy"]["spec"]["ingress"]
    assert operator["ports"] == [{"port": 8265, "protocol": "TCP"}]
    assert anybody == {"ports": [{"port": "http", "protocol": "TCP"}]}
    allowed = ours["from"][0]["podSelector"]["matchLabels"].items()
    submitter = made["RayJob"]["spec"]["submitterPodTemplate"]
    groups = made["RayCluster"]["spec"]["workerGroupSpecs"]
    pods = [
        submitter,
        made["RayCluster"]["spec"]["headGroupSpec"]["template"],
        *(g["template"] for g in groups),
    ]
    assert all(allowed <= pod["metadata"]["labels"].items() for pod in pods)


def test_the_shipped_file_is_what_the_command_prints() -> None:
    assert SHIPPED.read_text() == render_manifest(plain(), "keystroke:latest")


def test_every_model_of_ours_has_a_group_that_scales_as_its_table_says() -> None:
    fast = NamedModel(replicas=4, max_replicas=12, gpus=1.0)
    away = NamedModel(role="chat", engine="remote", base_url="https://models.example/v1", model="m")
    settings = replace(plain(), models={"coder": fast, "away": away})
    cluster = next(d for d in documents(settings, "keystroke:1") if d["kind"] == "RayCluster")
    groups = {g["groupName"]: g for g in cluster["spec"]["workerGroupSpecs"]}
    assert set(groups) == {"gateways", "engines-coder"}
    assert [groups["engines-coder"][k] for k in ("replicas", "minReplicas", "maxReplicas")] == [4, 4, 12]
    container = groups["engines-coder"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert RESOURCE in groups["gateways"]["rayStartParams"]["resources"]


def test_the_pods_read_settings_that_this_release_accepts(settings: Settings, tmp_path: Path) -> None:
    configuration = documents(settings, "keystroke:1")[0]["data"]["keystroke.toml"]
    assert tomllib.loads(configuration)["scale"]["gateway_resource"] == RESOURCE
    (tmp_path / "keystroke.toml").write_text(configuration)
    read = load_settings(cwd=Path("/"), environ={"KEYSTROKE_CONFIG": str(tmp_path)})
    assert read.models == settings.models
    assert read.scale.gateways == settings.scale.gateways
    assert read.server.host == "0.0.0.0"


def test_no_secret_is_written_and_nobody_runs_as_root() -> None:
    settings = plain()
    secret = replace(settings, server=replace(settings.server, database="postgresql://me:hunter2@db/keys"))
    text = render_manifest(secret, "keystroke:1")
    assert "hunter2" not in text
    cluster = next(d for d in yaml.safe_load_all(text) if d["kind"] == "RayCluster")
    pods = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for pod in pods:
        guard = pod["template"]["spec"]["containers"][0]["securityContext"]
        assert guard["runAsNonRoot"] is True
        assert guard["allowPrivilegeEscalation"] is False
