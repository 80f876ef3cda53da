"""Objects of the Prometheus operator: targets and rules."""

from __future__ import annotations

from textwrap import indent
from typing import Final

from baton.config.write.yaml_writer import yaml_text
from baton.manifests.cluster_deployment import ClusterDeployment, PlainDict
from baton.manifests.networking import metadata
from baton.manifests.pods import NAME_LABEL, label_selector
from baton.manifests.settings import ManifestSettings
from baton.telemetry import rules

SCRAPE_INTERVAL: Final = "5s"
"""The dashboards expect it."""
_GROUPS: Final = "groups:\n"


def monitor_objects(deployment: ClusterDeployment, settings: ManifestSettings) -> list[PlainDict]:
    """The targets."""
    objects = [_pod_monitor(settings)]
    if deployment.config.observability.metrics.enabled:
        objects.append(_scrape_config(deployment, settings))
    return objects


def _pod_monitor(settings: ManifestSettings) -> PlainDict:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(f"{settings.name}-ray", settings),
        "spec": {
            "selector": label_selector({NAME_LABEL: settings.name}),
            "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
        },
    }


def _scrape_config(deployment: ClusterDeployment, settings: ManifestSettings) -> PlainDict:
    """The metrics of baton: the controller lists every process that has some."""
    port = deployment.config.observability.metrics.port
    token = {"name": f"{settings.name}-console", "key": "token"}
    authorization = {"type": "Bearer", "credentials": token}
    return {
        "apiVersion": "monitoring.coreos.com/v1alpha1",
        "kind": "ScrapeConfig",
        "metadata": metadata(settings.name, settings),
        "spec": {
            "jobName": settings.name,
            "scrapeInterval": SCRAPE_INTERVAL,
            "authorization": authorization,
            "httpSDConfigs": [
                {
                    "url": f"http://{settings.name}-console.{settings.namespace}.svc:{port}/sd",
                    "refreshInterval": SCRAPE_INTERVAL,
                    "authorization": authorization,
                }
            ],
            # Dashboards and rules select a deployment by its job.
            "relabelings": [{"targetLabel": "job", "replacement": settings.name}],
        },
    }


def prometheus_rule(settings: ManifestSettings) -> str:
    """A PrometheusRule with all recording rules and alerts."""
    header: PlainDict = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata(settings.name, settings),
    }
    return yaml_text(header) + "spec:\n" + indent(rule_groups(settings.runbook_base), "  ")


def rule_groups(runbook_base: str | None) -> str:
    """The groups of all rule files, under one key."""
    files = rules.files(runbook_base=runbook_base)
    texts = (text.decode().partition(_GROUPS)[2] for text in files.values())
    return _GROUPS + "".join(texts)
