"""Writes the JSON Schemas that the Kubernetes manifest is validated against, next to this file.

From two sources that are fetched while developing: the custom resource definitions of KubeRay
(`ray.io_rayservices.yaml`, of the release named below) and the field lists of the `kubernetes` package.
Descriptions are left out, equal parts are stored once, and fields that are not listed are errors.

    python tests/scale/make_schemas.py ray.io_rayservices.yaml
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

KUBERAY = "v1.7.0"
KINDS = ("ConfigMap", "Service", "Ingress", "PodDisruptionBudget", "NetworkPolicy")
_KEPT = ("type", "enum", "pattern", "minimum", "maximum", "required", "minLength", "maxLength")


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema with only its rules; unknown fields are not allowed where fields are listed."""
    made: dict[str, Any] = {name: schema[name] for name in _KEPT if name in schema}
    if schema.get("x-kubernetes-int-or-string"):
        made = {"type": ["integer", "string"]}
    if "properties" in schema:
        made["properties"] = {name: strict(field) for name, field in schema["properties"].items()}
        made["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        made["items"] = strict(schema["items"])
    return made


def share(schema: Any, shared: dict[str, Any], top: bool = True) -> Any:
    """The schema with every larger part replaced by a reference into `shared`."""
    if not isinstance(schema, dict):
        return schema
    made = {
        name: {k: share(v, shared, top=False) for k, v in part.items()}
        if name == "properties"
        else share(part, shared, top=False)
        for name, part in schema.items()
    }
    text = json.dumps(made, sort_keys=True)
    if top or len(text) < 60:
        return made
    name = hashlib.sha256(text.encode()).hexdigest()[:8]
    shared[name] = made
    return {"$ref": f"#/$defs/{name}"}


def from_package(kind: str) -> dict[str, Any]:
    """The schema of a kind of Kubernetes' own, from the client's classes."""
    from kubernetes.client import models  # type: ignore[import-not-found]

    def of(name: str) -> dict[str, Any]:
        if found := re.fullmatch(r"[Ll]ist\[(.+)\]", name):
            return {"type": "array", "items": of(found[1])}
        if found := re.fullmatch(r"[Dd]ict[(\[]str, (.+)[)\]]", name):
            return {"type": "object", "additionalProperties": of(found[1])}
        plain = {"str": "string", "int": "integer", "bool": "boolean", "float": "number"}
        plain |= {"datetime": "string", "bytes": "string"}
        if name in plain:
            return {"type": plain[name]}
        if name == "object":
            return {"type": ["integer", "string", "object"]}
        if name == "V1ManagedFieldsEntry":
            return {"type": "object"}
        made = getattr(models, name)
        fields = {made.attribute_map[field]: of(kind) for field, kind in made.openapi_types.items()}
        return {"type": "object", "properties": fields, "additionalProperties": False}

    return of(f"V1{kind}")


def main() -> None:
    crd = yaml.safe_load(Path(sys.argv[1]).read_text())
    version = next(v for v in crd["spec"]["versions"] if v["name"] == "v1")
    schemas = {"RayService": strict(version["schema"]["openAPIV3Schema"])}
    # A structural schema says nothing about the metadata of objects, and little about that of pods.
    schemas["RayService"]["properties"]["metadata"] = from_package("ObjectMeta")
    schemas |= {kind: from_package(kind) for kind in KINDS}
    folder = Path(__file__).parent / "schemas"
    for kind, schema in schemas.items():
        shared: dict[str, Any] = {}
        made = share(schema, shared)
        made["$defs"] = dict(sorted(shared.items()))
        made["$comment"] = f"made by make_schemas.py: KubeRay {KUBERAY}, the kubernetes package"
        (folder / f"{kind}.json").write_text(json.dumps(made, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
