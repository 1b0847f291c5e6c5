"""A KubeRay manifest for the same configuration.

Talks to no cluster. Gateways and engines are separate worker groups, because one needs sockets and the other
GPUs. Secrets are referenced, never written. Only the gateways' port is reachable from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomlkit
import yaml  # type: ignore[import-untyped]

from keystroke.config import NamedModel, Settings

RESOURCE = "keystroke_gateway"  # one per gateway pod, so that every gateway has its own port
_RAY = "2.60.0"
_CLAIM = "keystroke-models"
_DASHBOARD = 8265  # used by the operator and its jobs
_LABEL = "keystroke.dev/part"


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

    tables = served_models(settings)
    groups = [_gateways(settings, image)]
    for name, table in tables.items():
        if table.engine != "remote":
            groups.append(_engines(name, table, settings, image))
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": _named("keystroke"),
        "spec": {
            "rayVersion": _RAY,
            "enableInTreeAutoscaling": True,
            "authOptions": {"mode": "token"},  # the operator creates it for every pod
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0"},
                "template": _pod("head", image, {"cpu": "2", "memory": "4Gi"}),
            },
            "workerGroupSpecs": groups,
        },
    }
    return [
        _configuration(settings, tables),
        cluster,
        _job(image),
        _service(settings),
        _disruption(),
        _policy(),
    ]


def _named(name: str, part: str | None = None) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "keystroke"}
    return {"name": name, "labels": labels | ({_LABEL: part} if part else {})}


def _configuration(settings: Settings, tables: Mapping[str, NamedModel]) -> dict[str, Any]:
    """A ConfigMap with keystroke.toml for the pods."""
    document = tomlkit.document()
    scale = {
        "address": "auto",
        "gateways": settings.scale.gateways,
        "replicas": settings.scale.replicas,
        "gateway_resource": RESOURCE,
        "load_factor": settings.scale.load_factor,
    }
    document["scale"] = scale
    document["server"] = {"host": "0.0.0.0", "port": settings.server.port, "drain_s": settings.server.drain_s}
    document["paths"] = {"models": "/models"}
    document["model"] = {"default": settings.model.default}
    models = {name: _table(table) for name, table in tables.items() if table != NamedModel()}
    if models:
        document["models"] = models
    data = {"keystroke.toml": tomlkit.dumps(document)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _named("keystroke"), "data": data}


def _table(table: NamedModel) -> dict[str, Any]:
    plain = NamedModel()
    names = [name for name in table.__dataclass_fields__ if getattr(table, name) != getattr(plain, name)]
    values = {name: getattr(table, name) for name in names}
    return {
        name: value if isinstance(value, int | float | str) else str(value) for name, value in values.items()
    }


def _gateways(settings: Settings, image: str) -> dict[str, Any]:
    count = settings.scale.gateways
    pod = _pod("gateway", image, {"cpu": "1", "memory": "2Gi"})
    container = pod["spec"]["containers"][0]
    container["ports"] = [{"name": "http", "containerPort": settings.server.port}]
    container["readinessProbe"] = {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": 2,
        "failureThreshold": 1,
    }
    return {
        "groupName": "gateways",
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count * 4,
        "rayStartParams": {"resources": f'"{{\\"{RESOURCE}\\": 1}}"'},
        "template": pod,
    }


def _engines(name: str, table: NamedModel, settings: Settings, image: str) -> dict[str, Any]:
    count = table.replicas or settings.scale.replicas
    wanted = {"cpu": f"{max(1, round(table.cpus))}", "memory": "8Gi"}
    if table.gpus:
        wanted["nvidia.com/gpu"] = str(max(1, round(table.gpus)))
        image = image.replace("keystroke:", "keystroke-cuda:") if image.startswith("keystroke:") else image
    return {
        "groupName": f"engines-{_label(name)}",
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": max(count, table.max_replicas),
        "rayStartParams": {},
        "template": _pod("engine", image, wanted),
    }


def _pod(part: str, image: str, wanted: dict[str, str]) -> dict[str, Any]:
    """A pod of the cluster, with time to finish running answers."""
    container = {
        "name": "ray",
        "image": image,
        "env": [
            {"name": "KEYSTROKE_CONFIG", "value": "/etc/keystroke/keystroke.toml"},
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
            {"name": "RAY_SERVE_USE_GRPC_BY_DEFAULT", "value": "1"},
            {"name": "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "value": "0"},
            {"name": "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "value": "0"},
            {
                "name": "KEYSTROKE_SERVER_DATABASE",
                "valueFrom": {"secretKeyRef": {"name": "keystroke", "key": "database"}},
            },
        ],
        "resources": {"limits": wanted, "requests": dict(wanted)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
        },
        "volumeMounts": [
            {"name": "configuration", "mountPath": "/etc/keystroke", "readOnly": True},
            {"name": "models", "mountPath": "/models", "readOnly": True},
        ],
    }
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": "keystroke", _LABEL: part}},
        "spec": {
            "automountServiceAccountToken": part == "head",  # its autoscaler creates pods
            "terminationGracePeriodSeconds": 90,
            "containers": [container],
            "volumes": [
                {"name": "configuration", "configMap": {"name": "keystroke"}},
                {"name": "models", "persistentVolumeClaim": {"claimName": _CLAIM, "readOnly": True}},
            ],
        },
    }


def _job(image: str) -> dict[str, Any]:
    """The job that deploys the application; applied again after a change it rolls the replicas."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _named("keystroke-up"),
        "spec": {
            "entrypoint": "keystroke scale up --address auto",
            "clusterSelector": {"ray.io/cluster": "keystroke"},
            "submitterPodTemplate": {
                "metadata": {"labels": {"app.kubernetes.io/name": "keystroke", _LABEL: "submit"}},
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [{"name": "submit", "image": image}],
                },
            },
        },
    }


def _service(settings: Settings) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _named("keystroke"),
        "spec": {
            "selector": {_LABEL: "gateway"},
            "ports": [{"name": "http", "port": settings.server.port, "targetPort": "http"}],
        },
    }


def _disruption() -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _named("keystroke-gateways"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {_LABEL: "gateway"}}},
    }


def _policy() -> dict[str, Any]:
    """Allows traffic among the pods, from the operator to the head, and from outside to the gateways' port
    only."""
    ours = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "keystroke"}}}
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _named("keystroke"),
        "spec": {
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "keystroke"}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [ours]},
                {"from": [operator], "ports": [{"port": _DASHBOARD, "protocol": "TCP"}]},
                {"ports": [{"port": "http", "protocol": "TCP"}]},
            ],
        },
    }


def _label(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-") or "model"
