"""The manifest for KubeRay: accepted by its definitions, as we ship it, with no secret in it."""

from __future__ import annotations

import importlib
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from keystroke.config import NamedModel, Settings, load_settings
from keystroke.scale.kuberay import RESOURCE, SECRET, default_image, documents, render_manifest

jsonschema = pytest.importorskip("jsonschema", reason="comes with the [scale] extra")

SHIPPED = Path(__file__).parents[2] / "deploy" / "kuberay.yaml"
SCHEMAS = Path(__file__).parent / "schemas"


def errors_of(document: dict[str, Any]) -> list[str]:
    """What the resource definition of its kind refuses, with unknown fields (see make_schemas.py)."""
    schema = json.loads((SCHEMAS / f"{document['kind']}.json").read_text())
    found = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.path))}: {error.message:.120}" for error in found]


def ray_of(settings: Settings) -> dict[str, Any]:
    made: dict[str, Any] = next(d for d in documents(settings, "keystroke:1") if d["kind"] == "RayService")
    return made


def pods_of(ray: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = ray["spec"]["rayClusterConfig"]
    groups = {g["groupName"]: g["template"] for g in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


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


def test_every_document_is_of_a_shape_its_definition_accepts(settings: Settings) -> None:
    made = list(yaml.safe_load_all(render_manifest(settings, "keystroke:1")))
    assert {d["kind"] for d in made} == {file.stem for file in SCHEMAS.glob("*.json")}
    assert {d["kind"]: errors_of(d) for d in made if errors_of(d)} == {}


def test_the_schemas_refuse_fields_that_the_operator_does_not_know() -> None:
    ray = ray_of(plain())
    ray["spec"]["rayClusterConfig"]["gcsFaultToleranceOption"] = {}
    pods_of(ray)["gateways"]["spec"]["containers"][0]["livenesProbe"] = {}
    assert len(errors_of(ray)) == 2


def test_the_head_comes_back_with_its_state(settings: Settings) -> None:
    ray = ray_of(settings)
    storage = ray["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert storage["redisAddress"] == "redis:6379"
    assert storage["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == SECRET
    # KubeRay refuses a second way to name it.
    environ = {e["name"] for pod in pods_of(ray).values() for e in pod["spec"]["containers"][0]["env"]}
    assert not environ & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"}


def test_serve_accepts_the_configuration_and_builds_the_application(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="the [scale] extra is not installed")
    from keystroke.scale.serve_config import read_settings

    read = schema.ServeDeploySchema.model_validate(yaml.safe_load(ray_of(settings)["spec"]["serveConfigV2"]))
    assert str(read.proxy_location) in ("Disabled", "ProxyLocation.Disabled")
    (application,) = read.applications
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    monkeypatch.delenv("KEYSTROKE_CONFIG", raising=False)
    pods = read_settings(application.args["configuration"])
    assert pods.models == settings.models
    assert pods.scale.gateway_resource == RESOURCE


def test_every_pod_is_probed_limited_and_restricted(settings: Settings) -> None:
    for pod in pods_of(ray_of(settings)).values():
        (container,) = pod["spec"]["containers"]
        assert {"livenessProbe", "readinessProbe"} <= container.keys()
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_only_pods_of_the_cluster_its_operator_and_monitoring_reach_ray(settings: Settings) -> None:
    made = {d["kind"]: d for d in documents(settings, "keystroke:1")}
    assert made["RayService"]["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    ours, operator, monitoring, anybody = made["NetworkPolicy"]["spec"]["ingress"]
    assert operator["ports"] == [{"port": 8265, "protocol": "TCP"}]
    assert monitoring["ports"] == [{"port": 8080, "protocol": "TCP"}]
    assert anybody == {"ports": [{"port": "http", "protocol": "TCP"}]}
    allowed = ours["from"][0]["podSelector"]["matchLabels"].items()
    assert all(allowed <= pod["metadata"]["labels"].items() for pod in pods_of(made["RayService"]).values())


def test_the_shipped_file_is_what_the_command_prints() -> None:
    assert SHIPPED.read_text() == render_manifest(plain(), default_image())
    assert ":latest" not in SHIPPED.read_text()


def test_every_model_of_ours_has_a_group_that_scales_as_its_table_says() -> None:
    fast = NamedModel(replicas=4, max_replicas=12, gpus=1.0)
    away = NamedModel(role="chat", engine="remote", base_url="https://models.example/v1", model="m")
    ray = ray_of(replace(plain(), models={"coder": fast, "away": away}))
    groups = {g["groupName"]: g for g in ray["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    assert set(groups) == {"gateways", "engines-coder"}
    assert [groups["engines-coder"][k] for k in ("replicas", "minReplicas", "maxReplicas")] == [4, 4, 12]
    pod = groups["engines-coder"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert RESOURCE in groups["gateways"]["rayStartParams"]["resources"]
    assert "nodeSelector" not in groups["gateways"]["template"]["spec"]


def test_the_pods_read_settings_that_this_release_accepts(settings: Settings, tmp_path: Path) -> None:
    configuration = documents(settings, "keystroke:1")[0]["data"]["keystroke.toml"]
    assert tomllib.loads(configuration)["scale"]["gateway_resource"] == RESOURCE
    (tmp_path / "keystroke.toml").write_text(configuration)
    read = load_settings(cwd=Path("/"), environ={"KEYSTROKE_CONFIG": str(tmp_path)})
    assert read.models == settings.models
    assert read.scale.gateways == settings.scale.gateways
    assert read.server.host == "0.0.0.0"


def test_no_secret_is_written_and_engines_get_none() -> None:
    settings = plain()
    secret = replace(settings, server=replace(settings.server, database="postgresql://me:hunter2@db/keys"))
    assert "hunter2" not in render_manifest(secret, "keystroke:1")
    for name, pod in pods_of(ray_of(settings)).items():
        secrets = {
            e["valueFrom"]["secretKeyRef"]["key"]
            for e in pod["spec"]["containers"][0]["env"]
            if "valueFrom" in e
        }
        assert secrets == (set() if name.startswith("engines") else {"database", "api-key"})
