"""A KubeRay manifest for the same configuration.

Talks to no cluster. Gateways and engines are separate worker groups, because one needs sockets and the other
GPUs. Secrets are referenced, never written. Only the gateways' port is reachable from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import tomlkit
import yaml  # type: ignore[import-untyped]

from keystroke.config import NamedModel, Settings
from keystroke.scale.served_models import NAME, served_models

RESOURCE = "keystroke_gateway"  # one per gateway pod, so that every gateway has its own port
SECRET = "keystroke"
_HEADER = """\
# Made by `keystroke scale manifest` for KubeRay 1.7 and Ray 2.60. Before `kubectl apply`:
#   kubectl create secret generic keystroke \\
#     --from-literal=database='postgresql://keystroke:PASSWORD@postgres/keystroke' \\
#     --from-literal=redis-password=PASSWORD \\
#     --from-literal=api-key="ks_$(openssl rand -hex 24)"      # the first API key
#   kubectl get secret keystroke -o jsonpath='{.data.api-key}' | base64 -d      # shows that key
# Further keys: `keystroke keys create NAME` in a gateway pod (kubectl exec). Postgres (`postgres`), Redis
# (`redis`), the volume claim `keystroke-models` and the certificate `keystroke-tls` are yours to provide.
"""


def default_image() -> str:
    """The image of the installed release."""
    return f"keystroke:{version('keystroke')}"


def render_manifest(settings: Settings, image: str, host: str = "keystroke.example.com") -> str:
    """The manifest as text. `host`: the name that clients use."""
    parts = documents(settings, image, host)
    body: str = yaml.dump_all(parts, Dumper=_Dumper, sort_keys=False, width=110)
    return _HEADER + body


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes texts of several lines as literal blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def documents(settings: Settings, image: str, host: str = "keystroke.example.com") -> list[dict[str, Any]]:
    text = files("keystroke.scale").joinpath("kuberay.yaml").read_text(encoding="utf-8")
    made: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    configuration, ray, service, ingress, *_, pod = made
    tables = served_models(settings)
    toml = _configuration(settings, tables)
    configuration["data"] = {"keystroke.toml": toml}
    ray["spec"]["serveConfigV2"] = yaml.dump(_serve_config(toml), Dumper=_Dumper, sort_keys=False)
    cluster = ray["spec"]["rayClusterConfig"]
    head = _pod(pod, "head", image, {"cpu": "2", "memory": "4Gi"}, secrets=True)
    head["spec"]["automountServiceAccountToken"] = True  # its autoscaler creates pods
    cluster["headGroupSpec"]["template"] = head
    cluster["workerGroupSpecs"] = [
        _gateways(settings, _pod(pod, "gateway", image, {"cpu": "1", "memory": "2Gi"}, secrets=True)),
        *(_engines(n, t, settings, image, pod) for n, t in tables.items() if t.engine != "remote"),
    ]
    service["spec"]["ports"][0]["port"] = settings.server.port
    ingress["spec"]["tls"][0]["hosts"] = [host]
    ingress["spec"]["rules"][0]["host"] = host
    return made[:-1]


def _serve_config(toml: str) -> dict[str, Any]:
    """What the operator submits to Serve: the application, without Serve's own proxies."""
    application = {
        "name": NAME,
        "route_prefix": None,
        "import_path": "keystroke.scale.serve_config:build",
        "args": {"configuration": toml},
    }
    return {"proxy_location": "Disabled", "applications": [application]}


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
    pod["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"keystroke.dev/part": "gateway"}},
        }
    ]
    started = {"resources": f'"{{\\"{RESOURCE}\\": 1}}"'}
    return _group("gateways", count, count * 4, started, pod)


def _engines(
    name: str, table: NamedModel, settings: Settings, image: str, pod: dict[str, Any]
) -> dict[str, Any]:
    count = table.replicas or settings.scale.replicas
    resources = {"cpu": f"{max(1, round(table.cpus))}", "memory": "8Gi"}
    if table.gpus:
        resources["nvidia.com/gpu"] = str(max(1, round(table.gpus)))
        image = image.replace("keystroke:", "keystroke-cuda:") if image.startswith("keystroke:") else image
    label = "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-") or "model"
    most = max(count, table.max_replicas)
    made = _pod(pod, "engine", image, resources)
    if table.gpus:
        made["spec"] |= {
            "nodeSelector": {"nvidia.com/gpu.present": "true"},  # a label of NVIDIA's device plugin
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        }
    return _group(f"engines-{label}", count, most, {}, made)


def _group(name: str, count: int, most: int, started: dict[str, str], pod: dict[str, Any]) -> dict[str, Any]:
    scaling = {"replicas": count, "minReplicas": count, "maxReplicas": most}
    return {"groupName": name, **scaling, "rayStartParams": started, "template": pod}


def _pod(
    template: dict[str, Any], part: str, image: str, resources: dict[str, str], *, secrets: bool = False
) -> dict[str, Any]:
    """`secrets`: it reads the database's address and the API key. Engines need neither."""
    pod = deepcopy(template)
    pod["metadata"]["labels"]["keystroke.dev/part"] = part
    container = pod["spec"]["containers"][0]
    container |= {"image": image, "resources": {"limits": resources, "requests": resources}}
    for variable, key in _SECRETS.items() if secrets else ():
        reference = {"secretKeyRef": {"name": SECRET, "key": key}}
        container["env"].append({"name": variable, "valueFrom": reference})
    return pod


_SECRETS = {"KEYSTROKE_SERVER_DATABASE": "database", "KEYSTROKE_API_KEY": "api-key"}
