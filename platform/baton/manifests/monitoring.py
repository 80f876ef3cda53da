"""Objects of the Prometheus operator: targets, and our rules."""

from __future__ import annotations

from textwrap import indent
from typing import Final

from baton.manifests.cluster_deployment import ClusterDeployment, PlainDict
from baton.manifests.networking import metadata
from baton.manifests.pods import NAME_LABEL, label_selector
from baton.manifests.settings import ManifestSettings
from baton.manifests.yaml_writer import yaml_text
from baton.telemetry import rules

SCRAPE_INTERVAL: Final = "5s"
"""As the dashboards expect it."""
_GROUPS: Final = "groups:\n"


def monitor_objects(deployment: ClusterDeployment, settings: ManifestSettings) -> list[PlainDict]:
    """The targets."""
    objects = [pod_monitor(settings)]
    if deployment.config.observability.metrics.enabled:
        objects.append(scrape_config(deployment, settings))
    return objects


def pod_monitor(settings: ManifestSettings) -> PlainDict:
    """Ray's own metrics, of every node."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(f"{settings.name}-ray", settings),
        "spec": {
            "selector": label_selector({NAME_LABEL: settings.name}),
            "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
        },
    }


def scrape_config(deployment: ClusterDeployment, settings: ManifestSettings) -> PlainDict:
    """The metrics of baton: the controller names every process that has some."""
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
            # The dashboards and rules know a deployment by the name of its job.
            "relabelings": [{"targetLabel": "job", "replacement": settings.name}],
        },
    }


def prometheus_rule(settings: ManifestSettings) -> str:
    """A PrometheusRule with our recording rules and alerts, all of them."""
    header: PlainDict = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata(settings.name, settings),
    }
    return yaml_text(header) + "spec:\n" + indent(rule_groups(), "  ")


def rule_groups() -> str:
    """The groups of every rule file, as they are written there, under one key."""
    texts = (text.decode().partition(_GROUPS)[2] for text in rules.files().values())
    return _GROUPS + "".join(texts)
