"""A KubeRay manifest for the same configuration.

Talks to no cluster. Gateways and engines are separate worker groups, because one needs sockets and the other
GPUs. Secrets are referenced, never written. Only the gateways' port is reachable from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import tomlkit
import yaml  # type: ignore[import-untyped]

from keystroke.config import NamedModel, Settings

RESOURCE = "keystroke_gateway"  # one per gateway pod, so that every gateway has its own port


def render_manifest(settings: Settings, image: str) -> str:
    """The manifest as text."""
    head = (
        "# Made by `keystroke scale manifest`. It needs the KubeRay operator, a Secret `keystroke` with\n"
        "# `database` (a Postgres URL), and a volume claim `keystroke-models` that holds the models.\n"
    )
    body: str = yaml.dump_all(documents(settings, image), Dumper=_Dumper, sort_keys=False, width=110)
    return head + body


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes texts of several lines as literal blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def documents(settings: Settings, image: str) -> list[dict[str, Any]]:
    from keystroke.scale.served_models import served_models

    text = files("keystroke.scale").joinpath("kuberay.yaml").read_text(encoding="utf-8")
    made: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    configuration, cluster, job, service, _, _, pod = made
    tables = served_models(settings)
    configuration["data"] = {"keystroke.toml": _configuration(settings, tables)}
    head = _pod(pod, "head", image, {"cpu": "2", "memory": "4Gi"})
    head["spec"]["automountServiceAccountToken"] = True  # its autoscaler creates pods
    cluster["spec"]["headGroupSpec"]["template"] = head
    cluster["spec"]["workerGroupSpecs"] = [
        _gateways(settings, _pod(pod, "gateway", image, {"cpu": "1", "memory": "2Gi"})),
        *(_engines(n, t, settings, image, pod) for n, t in tables.items() if t.engine != "remote"),
    ]
    job["spec"]["submitterPodTemplate"]["spec"]["containers"][0]["image"] = image
    service["spec"]["ports"][0]["port"] = settings.server.port
    return made[:-1]


def _configuration(settings: Settings, tables: Mapping[str, NamedModel]) -> str:
    """The pods' keystroke.toml."""
    document = tomlkit.document()
    document["scale"] = {
        "address": "auto",
        "gateways": settings.scale.gateways,
        "replicas": settings.scale.replicas,
        "gateway_resource": RESOURCE,
        "load_factor": settings.scale.load_factor,
    }
    document["server"] = {"host": "0.0.0.0", "port": settings.server.port, "drain_s": settings.server.drain_s}
    document["paths"] = {"models": "/models"}
    document["model"] = {"default": settings.model.default}
    models = {name: _table(table) for name, table in tables.items() if table != NamedModel()}
    if models:
        document["models"] = models
    return tomlkit.dumps(document)


def _table(table: NamedModel) -> dict[str, Any]:
    """The settings of a model that differ from the defaults."""
    plain = asdict(NamedModel())
    changed = {name: value for name, value in asdict(table).items() if value != plain[name]}
    return {name: v if isinstance(v, int | float | str) else str(v) for name, v in changed.items()}


def _gateways(settings: Settings, pod: dict[str, Any]) -> dict[str, Any]:
    count = settings.scale.gateways
    pod["spec"]["containers"][0] |= {
        "ports": [{"name": "http", "containerPort": settings.server.port}],
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 2,
            "failureThreshold": 1,
        },
    }
    started = {"resources": f'"{{\\"{RESOURCE}\\": 1}}"'}
    return _group("gateways", count, count * 4, started, pod)


def _engines(
    name: str, table: NamedModel, settings: Settings, image: str, pod: dict[str, Any]
) -> dict[str, Any]:
    count = table.replicas or settings.scale.replicas
    wanted = {"cpu": f"{max(1, round(table.cpus))}", "memory": "8Gi"}
    if table.gpus:
        wanted["nvidia.com/gpu"] = str(max(1, round(table.gpus)))
        image = image.replace("keystroke:", "keystroke-cuda:") if image.startswith("keystroke:") else image
    label = "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-") or "model"
    most = max(count, table.max_replicas)
    return _group(f"engines-{label}", count, most, {}, _pod(pod, "engine", image, wanted))


def _group(name: str, count: int, most: int, started: dict[str, str], pod: dict[str, Any]) -> dict[str, Any]:
    scaling = {"replicas": count, "minReplicas": count, "maxReplicas": most}
    return {"groupName": name, **scaling, "rayStartParams": started, "template": pod}


def _pod(template: dict[str, Any], part: str, image: str, wanted: dict[str, str]) -> dict[str, Any]:
    pod = deepcopy(template)
    pod["metadata"]["labels"]["keystroke.dev/part"] = part
    pod["spec"]["containers"][0] |= {"image": image, "resources": {"limits": wanted, "requests": wanted}}
    return pod
