"""Deploys an application and waits for it, reporting missing resources.

Ray waits forever for a node with room; users are told after a few seconds what is missing, and get an error
after their timeout. What was deployed to a cluster stays there and starts as soon as there is room.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keystroke.errors import ConfigError, Unavailable

REPORT_AFTER = 5.0  # seconds after which missing resources are reported
_POLL = 0.2  # seconds between two reads of the status

# The resources of one replica of each deployment, by Ray's names.
Needs = Mapping[str, Mapping[str, float]]
Say = Callable[[str], object]


def missing_resources(needs: Needs, nodes: Iterable[Mapping[str, float]]) -> list[str]:
    """A sentence for every deployment of which no node, even empty, could hold a replica."""
    nodes = list(nodes)
    sentences = []
    for name, resources in needs.items():
        if any(all(node.get(kind, 0) >= amount for kind, amount in resources.items()) for node in nodes):
            continue
        lacking = {
            kind: amount
            for kind, amount in resources.items()
            if amount and not any(node.get(kind, 0) >= amount for node in nodes)
        }
        most = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in lacking or resources}
        needed = ", ".join(f"{amount:g} {kind}" for kind, amount in (lacking or resources).items())
        found = ", ".join(f"{amount:g} {kind}" for kind, amount in most.items())
        offered = f"a node has at most {found}" if lacking else "no node has all of it"
        sentences.append(f"a replica of {name} takes {needed}, and {offered}")
    return sentences


def deploy(
    serve: Any,
    app: Any,
    name: str,
    *,
    needs: Needs | None = None,
    patience: float | None = None,
    final: bool = False,
    say: Say = lambda _line: None,
) -> None:
    """Deploy the application, replacing an earlier generation replica by replica. Missing resources are
    reported once, after some seconds. `final`: no nodes will be added, so a replica that fits on none is an
    error at once. Raises ConfigError for that, and Unavailable where it does not start, or not within
    `patience` seconds."""
    import ray

    def find_missing() -> list[str]:
        return missing_resources(needs or {}, (node["Resources"] for node in ray.nodes() if node["Alive"]))

    if final and (missing := find_missing()):
        raise ConfigError(f"The replicas have no place on this machine: {'; '.join(missing)}.")
    try:
        target = serve.RunTarget(app, name=name, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)
    except Exception as error:
        raise _deploy_error(error) from None
    began, reported = time.monotonic(), False
    while (state := serve.status().applications[name]).status != "RUNNING":
        if state.status == "DEPLOY_FAILED":
            raise _deploy_error(state.message, *(d.message for d in state.deployments.values()))
        waited = time.monotonic() - began
        if patience is not None and waited > patience:
            raise Unavailable(
                f"The replicas did not come up within {patience:g} seconds: "
                f"{_describe_waiting(find_missing(), state)}. "
                "On a cluster they come up as soon as there is room; `keystroke scale down` takes them off."
            )
        if waited > REPORT_AFTER and not reported and (missing := find_missing()):
            reported = True
            say(f"still waiting: {'; '.join(missing)}")
        time.sleep(_POLL)


def application_state(serve: Any, name: str) -> dict[str, Any] | None:
    """The application's status and the states of its replicas as plain values; None where it does not run."""
    found = serve.status().applications.get(name)
    if found is None:
        return None
    deployments = {
        deployment: {
            "status": str(state.status.value),
            "replicas": {str(kind): count for kind, count in state.replica_states.items()},
        }
        for deployment, state in found.deployments.items()
    }
    return {"status": str(found.status.value), "deployments": deployments}


def _describe_waiting(lacking: list[str], state: Any) -> str:
    """What is known of why: a replica that fits nowhere, else those that are not running yet."""
    if lacking:
        return "; ".join(lacking)
    late = [
        f"{sum(d.replica_states.values()) - d.replica_states.get('RUNNING', 0)} of {name} not yet running"
        for name, d in state.deployments.items()
        if d.status != "HEALTHY"
    ]
    return ", ".join(late) or str(state.status.value)


def _deploy_error(why: object, *replicas: str) -> Unavailable:
    """Where a replica failed with an error of ours, its sentence; else what Ray says of the application and
    the last error of `replicas`, which are Ray's messages about each deployment."""
    text = "\n".join([str(why), *replicas])
    if ours := re.findall(r"keystroke\.errors\.\w+: (.+)", text):
        return Unavailable(f"The replicas did not come up: {ours[-1].strip().rstrip('.')}.")
    errors = re.findall(r"^\w[\w.]*(?:Error|Exception): .+", "\n".join(replicas), re.MULTILINE)
    why = ": ".join([str(why).rstrip("."), *errors[-1:]])
    return Unavailable(f"The replicas did not come up: {why}; see Ray's logs under /tmp/ray.")
