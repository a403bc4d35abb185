"""The dashboard for Grafana names only metrics and labels that the router and the service have."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.gateway.place import running_gateway
from traced.api.control import Control
from traced.api.monitoring import prometheus

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "traced.json"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
METRIC, LABELS = re.compile(r"\btraced_\w+"), re.compile(r"by \(([^)]*)\)|\{(\w+)[!=~]")


def labels_by_metric(text: str) -> dict[str, set[str]]:
    """Return the labels of every metric; they are empty for a metric without samples."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for suffix in SUFFIXES[family.type]:
            labels[family.name + suffix] = set()
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def expressions(dashboard: dict[str, Any]) -> list[str]:
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    return [target["expr"] for panel in panels for target in panel["targets"]]


async def test_every_expression_names_what_a_scrape_has(control: Control, tmp_path: Path) -> None:
    async with running_gateway(tmp_path / "router") as gateway:
        await gateway.ask("base")
        router_text = (await gateway.http.get("/metrics")).text
    labels = labels_by_metric(router_text) | labels_by_metric(prometheus(control).decode())
    dashboard = json.loads(DASHBOARD.read_text())
    assert [variable["type"] for variable in dashboard["templating"]["list"]] == ["datasource"]
    names = set()
    for expression in expressions(dashboard):
        (name,) = METRIC.findall(expression)
        names.add(name)
        assert name in labels, expression
        used = {label.strip() for groups in LABELS.findall(expression) for label in ",".join(groups).split(",")}
        assert not labels[name] or used - {""} <= labels[name], expression
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in labels if not name.endswith("_created")}
    assert {re.sub(r"_bucket$", "", name) for name in names} == families
