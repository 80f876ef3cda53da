"""Ray Serve's configuration, in its own declarative form (`serve deploy`, `serveConfigV2`)."""

from __future__ import annotations

from typing import Final

from baton.manifests.cluster_deployment import ClusterDeployment, PlainDict
from baton.manifests.environment import serve_address, uses_ingress_listener
from baton.manifests.node_groups import FRONT_RESOURCE, FRONT_SHARE, HEAD_RESOURCE
from baton.serving.shared.names import APP, CONTROLLER, INGRESS

IMPORT_PATH: Final = "baton.serving.app_builder:application"
_MIN_RESOURCE: Final = 0.001


def serve_config(deployment: ClusterDeployment, *, pin_to_nodes: bool = True) -> PlainDict:
    """The whole of it: Ray's `ServeDeploySchema`.

    The configuration goes along as the application's argument. So a change of it changes this, and
    Serve sees that there is something to do.

    Args:
        deployment: The deployment to run.
        pin_to_nodes: Whether nodes say what they are for, as those of our own manifests do; else
            ingress and controller go wherever there is room.
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
        # Where ingresses are the front, Serve starts its proxy on the head alone, without regard to
        # this.
        "proxy_location": "HeadOnly" if uses_ingress_listener(config) else "EveryNode",
        "http_options": {"host": host, "port": port},
        "applications": [
            {
                "name": APP,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                # Pools are sized by the controller, not by Serve's own autoscaler.
                "external_scaler_enabled": True,
                "args": {"config": deployment.explicit_values},
                **({"deployments": pinned_deployments} if pinned_deployments else {}),
            }
        ],
    }


def _pinned_deployment(deployment: str, resource: str, amount: float) -> PlainDict:
    """A deployment on the nodes that have a resource, and on no others."""
    options: PlainDict = {"num_cpus": 0, "resources": {resource: amount}}
    return {"name": deployment, "ray_actor_options": options}
