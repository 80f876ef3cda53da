"""What Ray Serve is told to run, in its own declarative form (`serve deploy`, `serveConfigV2`)."""

from __future__ import annotations

from typing import Final

from baton.manifests.cluster_deployment import Adapted, Plain
from baton.manifests.environment import gated, serves_address
from baton.manifests.node_groups import FRONT, FRONT_SHARE, HEAD
from baton.serving.shared.names import APP, CONTROLLER, INGRESS

IMPORT_PATH: Final = "baton.serving.app_builder:application"
_SLIVER: Final = 0.001


def serve_config(deployment: Adapted, *, placed: bool = True) -> Plain:
    """The whole of it: Ray's `ServeDeploySchema`.

    The configuration goes along as the application's argument, so that whoever changes it changes
    this, and Serve sees that there is something to do.

    Args:
        deployment: What is to run.
        placed: Whether nodes say what they are for, as those of our own manifests do; else ingress
            and controller go wherever there is room.
    """
    config = deployment.config
    host, port = serves_address(config)
    at = [_at(INGRESS, FRONT, FRONT_SHARE), _at(CONTROLLER, HEAD, _SLIVER)] if placed else []
    return {
        # Where ingresses are the front, Serve starts its proxy on the head alone, whatever is said.
        "proxy_location": "HeadOnly" if gated(config) else "EveryNode",
        "http_options": {"host": host, "port": port},
        "applications": [
            {
                "name": APP,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                # Pools are sized by the controller, not by Serve's own autoscaler.
                "external_scaler_enabled": True,
                "args": {"config": deployment.written},
                **({"deployments": at} if at else {}),
            }
        ],
    }


def _at(deployment: str, resource: str, share: float) -> Plain:
    """A deployment on the nodes that have a resource, and on no others."""
    options: Plain = {"num_cpus": 0, "resources": {resource: share}}
    return {"name": deployment, "ray_actor_options": options}
