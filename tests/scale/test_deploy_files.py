"""Files for operators agree with the program: every metric a dashboard asks for is one that is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from keystroke.scale.supervisor import targets_file

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_dashboard_asks_for_metrics_that_gateways_tell() -> None:
    pytest.importorskip("ray", reason="the [scale] extra is not installed")
    from keystroke.scale.ray_metrics import RayMetrics, ReplicaMetrics

    told = {
        f"ray_{m._name}"
        for exported in (RayMetrics("test"), ReplicaMetrics("test", "model"))
        for m in vars(exported).values()
        if hasattr(m, "_tag_keys") and m._name.startswith("keystroke_")
    }
    assert told
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = {t["expr"] for panel in board["panels"] for t in panel["targets"]}
    alerts = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    asked |= {rule["expr"] for group in alerts["groups"] for rule in group["rules"]}
    names = {name for expr in asked for name in re.findall(r"ray_keystroke_\w+", expr)}
    assert names
    assert {re.sub(r"_(total|bucket)$", "", name) for name in names} <= told


def test_panels_have_places_and_names_of_their_own() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    assert len({p["id"] for p in panels}) == len({p["title"] for p in panels}) == len(panels)
    assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}) == len(panels)


def test_prometheus_reads_the_file_that_scale_up_writes() -> None:
    read = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    local = read["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert local == [str(targets_file())]


def test_prometheus_finds_the_pods_of_the_manifest() -> None:
    read = yaml.safe_load((DEPLOY / "prometheus-kubernetes.yaml").read_text())
    kept, address, part = read["scrape_configs"][0]["relabel_configs"]
    manifest = (DEPLOY / "kuberay.yaml").read_text()
    assert f"app.kubernetes.io/name: {kept['regex']}\n" in manifest
    assert f"port: {address['replacement'].partition(':')[2]}\n" in manifest
    assert f"keystroke.dev/{part['target_label']}: gateway\n" in manifest


@pytest.mark.parametrize("name", ["prometheus.yaml", "prometheus-kubernetes.yaml"])
def test_alerts_are_where_prometheus_looks_for_them(name: str) -> None:
    read = yaml.safe_load((DEPLOY / name).read_text())
    assert [(DEPLOY / file).is_file() for file in read["rule_files"]] == [True]


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.cuda"])
def test_images_copy_what_there_is_and_do_not_run_as_root(name: str) -> None:
    lines = (DEPLOY / name).read_text().splitlines()
    copied = [
        w for line in lines if line.startswith("COPY") and "--from" not in line for w in line.split()[1:-1]
    ]
    assert copied
    assert all((DEPLOY.parent / path).exists() for path in copied)
    sent = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert sorted(line[1:] for line in sent if line[:1] == "!") == sorted(copied)  # no more, and no less
    assert [line.split()[1] for line in lines if line.startswith("USER")] == ["1000"]
    assert any("RAY_USAGE_STATS_ENABLED=0" in line for line in lines)
