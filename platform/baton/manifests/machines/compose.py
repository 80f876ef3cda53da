"""Prometheus and Grafana beside a deployment on one machine, with baton's dashboards and rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.yaml_writer import yaml_text
from baton.domain.names.addresses import connectable_host, format_endpoint
from baton.manifests.cluster_deployment import PlainDict
from baton.manifests.monitoring import SCRAPE_INTERVAL
from baton.manifests.settings import CannotExport, ManifestSettings
from baton.telemetry import dashboards, rules

_PROMETHEUS: Final = "prom/prometheus:v3.5.0"
_GRAFANA: Final = "grafana/grafana:12.1.1"
_DASHBOARDS_DIR: Final = "/var/lib/grafana/dashboards/baton"
"""The shipped provisioning names it."""
_TOKEN_PATH: Final = "/run/secrets/console"  # noqa: S105 - where it is, not what it is
_RETENTION: Final = "31d"
"""The longest window of rules is 30 days, and they read a little before it."""


def compose_files(config: DeploymentConfig, settings: ManifestSettings) -> Mapping[str, bytes]:
    """`compose.yaml`, Prometheus' configuration, and the folder of dashboards and rules.

    Both services use the host's network and listen on loopback, where `baton up` has its metrics by
    default.

    Raises:
        CannotExport: metrics are disabled, or their port is not fixed.
    """
    if not config.observability.metrics.enabled:
        raise CannotExport(
            "observability.metrics.enabled is false: there is nothing to scrape",
            "remove it, or do without compose",
        )
    if config.observability.metrics.port == 0:
        raise CannotExport(
            "observability.metrics.port is 0, any that is free: Prometheus needs a fixed port",
            "give the port a number, as 9400",
        )
    dashboard_files = {
        name: text for name, text in dashboards.files().items() if name != "prometheus.yml"
    }
    rule_texts = rules.files(runbook_base=settings.runbook_base)
    rule_files = {f"rules/{name}": text for name, text in rule_texts.items()}
    return {
        "compose.yaml": yaml_text(_compose(config, settings)).encode(),
        "prometheus.yaml": yaml_text(_prometheus_config(config, settings)).encode(),
        **{f"dashboards/{name}": text for name, text in (dashboard_files | rule_files).items()},
    }


def _compose(config: DeploymentConfig, settings: ManifestSettings) -> PlainDict:
    token = config.observability.token_file
    prometheus: PlainDict = {
        "image": _PROMETHEUS,
        "network_mode": "host",
        "restart": "unless-stopped",
        "command": [
            "--config.file=/etc/prometheus/prometheus.yaml",
            "--web.listen-address=127.0.0.1:9090",
            f"--storage.tsdb.retention.time={_RETENTION}",
        ],
        "volumes": [
            "./prometheus.yaml:/etc/prometheus/prometheus.yaml:ro",
            "./dashboards/rules:/etc/prometheus/rules:ro",
            "prometheus:/prometheus",
        ],
    }
    grafana: PlainDict = {
        "image": _GRAFANA,
        "network_mode": "host",
        "restart": "unless-stopped",
        "environment": {
            "GF_SERVER_HTTP_ADDR": "127.0.0.1",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_USERS_ALLOW_SIGN_UP": "false",
        },
        "volumes": [
            "./dashboards/provisioning:/etc/grafana/provisioning:ro",
            f"./dashboards:{_DASHBOARDS_DIR}:ro",
            "grafana:/var/lib/grafana",
        ],
        "depends_on": ["prometheus"],
    }
    compose: PlainDict = {
        "name": settings.name,
        "services": {"prometheus": prometheus, "grafana": grafana},
        "volumes": {"prometheus": {}, "grafana": {}},
    }
    if token is not None:
        prometheus["secrets"] = ["console"]
        compose["secrets"] = {"console": {"file": token if token[:1] in "/." else f"./{token}"}}
    return compose


def _prometheus_config(config: DeploymentConfig, settings: ManifestSettings) -> PlainDict:
    metrics = config.observability.metrics
    discovery: PlainDict = {
        "url": f"{format_endpoint('http', connectable_host(metrics.host), metrics.port)}/sd",
        "refresh_interval": SCRAPE_INTERVAL,
    }
    job: PlainDict = {"job_name": settings.name, "http_sd_configs": [discovery]}
    if config.observability.token_file is not None:
        authorization = {"type": "Bearer", "credentials_file": _TOKEN_PATH}
        job["authorization"] = discovery["authorization"] = authorization
    return {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL},
        "rule_files": ["rules/*.yaml"],
        "scrape_configs": [job],
    }
