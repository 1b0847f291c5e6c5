"""An application on its way up: put there, waited for, and what it lacks said.

Ray waits for ever for a node with room; people are told what is missing after a few seconds, and get an
error when their patience ends. What was put on a cluster stays there: it comes up by itself as soon as there
is room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keystroke.errors import ConfigError, Unavailable

TELLING = 5.0  # seconds after which a replica without a place is worth a word; free places are taken sooner
_LOOK = 0.2  # seconds between two looks at the status: a few calls a second are nothing to the controller

# What one replica of each deployment takes, by Ray's resource names.
Needs = Mapping[str, Mapping[str, float]]


def missing(needs: Needs, nodes: Iterable[Mapping[str, float]]) -> list[str]:
    """A sentence for every deployment of which no node could hold a single replica, however empty it were."""
    nodes = list(nodes)
    said = []
    for name, wanted in needs.items():
        if any(all(node.get(kind, 0) >= amount for kind, amount in wanted.items()) for node in nodes):
            continue
        lacking = {
            kind: amount
            for kind, amount in wanted.items()
            if amount and not any(node.get(kind, 0) >= amount for node in nodes)
        }
        most = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in lacking or wanted}
        asked = ", ".join(f"{amount:g} {kind}" for kind, amount in (lacking or wanted).items())
        found = ", ".join(f"{amount:g} {kind}" for kind, amount in most.items())
        held = f"a node has at most {found}" if lacking else "no node has all of it"
        said.append(f"a replica of {name} takes {asked}, and {held}")
    return said


def deploy(
    serve: Any,
    app: Any,
    name: str,
    *,
    needs: Needs | None = None,
    patience: float | None = None,
    final: bool = False,
    say: Callable[[str], object] = lambda _line: None,
) -> None:
    """Run the application, replacing an earlier generation of it replica by replica. What it waits for is
    said once, after some seconds. `final`: no nodes will be added, so that a replica that fits on none is an
    error at once. Raises ConfigError for that, and Unavailable where it does not come up, or not within
    `patience` seconds."""
    import ray

    def lacks() -> list[str]:
        return missing(needs or {}, (node["Resources"] for node in ray.nodes() if node["Alive"]))

    if final and (said := lacks()):
        raise ConfigError(f"The replicas have no place on this machine: {'; '.join(said)}.")
    try:
        target = serve.RunTarget(app, name=name, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)
    except Exception as error:
        raise _failed(error) from None
    began, told = time.monotonic(), False
    while (state := serve.status().applications[name]).status != "RUNNING":
        if state.status == "DEPLOY_FAILED":
            raise _failed(state.message)
        waited = time.monotonic() - began
        if patience is not None and waited > patience:
            raise Unavailable(
                f"The replicas did not come up within {patience:g} seconds: {_waiting(lacks(), state)}. "
                "On a cluster they come up as soon as there is room; `keystroke scale down` takes them off."
            )
        if waited > TELLING and not told and (said := lacks()):
            told = True
            say(f"still waiting: {'; '.join(said)}")
        time.sleep(_LOOK)


def _waiting(lacking: list[str], state: Any) -> str:
    """What is known of why: a replica that fits nowhere, else those that are not running yet."""
    if lacking:
        return "; ".join(lacking)
    late = [
        f"{sum(d.replica_states.values()) - d.replica_states.get('RUNNING', 0)} of {name} not yet running"
        for name, d in state.deployments.items()
        if d.status != "HEALTHY"
    ]
    return ", ".join(late) or str(state.status.value)


def _failed(why: object) -> Unavailable:
    return Unavailable(f"The replicas did not come up: {why}; see Ray's logs under /tmp/ray.")
