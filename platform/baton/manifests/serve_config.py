"""Ray Serve's declarative configuration (`serve deploy`, `serveConfigV2`)."""

from __future__ import annotations

from typing import Final

from baton.manifests.cluster_deployment import ClusterDeployment, PlainDict
from baton.manifests.environment import serve_address, uses_ingress_listener
from baton.manifests.node_groups import FRONT_RESOURCE, FRONT_SHARE, HEAD_RESOURCE
from baton.serving.shared.names import APP, CONTROLLER, INGRESS

IMPORT_PATH: Final = "baton.serving.app_builder:application"
_MIN_RESOURCE: Final = 0.001


def serve_config(deployment: ClusterDeployment, *, pin_to_nodes: bool = True) -> PlainDict:
    """Ray's `ServeDeploySchema`; the configuration is an argument in it, so Serve sees its changes.

    With `pin_to_nodes`, nodes must have the resources of baton's manifests; else ingress and
    controller run anywhere.
    """
    config = deployment.config
    host, port = serve_address(config)
    pinned_deployments = (
        [
            _pinned_deployment(INGRESS, FRONT_RESOURCE, FRONT_SHARE),
            _pinned_deployment(CONTROLLER, HEAD_RESOURCE, _MIN_RESOURCE),
        ]
        if pin_to_nodes
        else []
    )
    return {
        # With ingresses as the front, Serve starts its proxy on the head alone.
        "proxy_location": "HeadOnly" if uses_ingress_listener(config) else "EveryNode",
        "http_options": {"host": host, "port": port},
        "applications": [
            {
                "name": APP,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                # The controller sizes pools, not Serve's autoscaler.
                "external_scaler_enabled": True,
                "args": {"config": deployment.explicit_values},
                **({"deployments": pinned_deployments} if pinned_deployments else {}),
            }
        ],
    }


def _pinned_deployment(deployment: str, resource: str, amount: float) -> PlainDict:
    """A deployment that runs only on nodes with a resource."""
    options: PlainDict = {"num_cpus": 0, "resources": {resource: amount}}
    return {"name": deployment, "ray_actor_options": options}
