"""Every coupling of baton to private names of Ray and Ray Serve, and to Serve's HAProxy template.

`ray.serve` reads its environment when it is imported, and guards import it. So only processes whose
environment is set call them: replicas, and the process of `serving.checks.facts`.
"""

from __future__ import annotations

from typing import Final

from baton.runtime.patch import Patch, Target, replace_attributes
from baton.runtime.patch_guards import all_of, contains_text, has, has_fields, takes
from baton.serving.front.haproxy_wrapper import GuardFields, UnexpectedConfiguration, harden

_CONTROLLER = "ray.serve._private.controller:ServeController"
_CALL_FAILS = "the command or replica that needs it fails"


def _ray(*names: str) -> Target:
    return Target(package="ray", names=names, tested=("2.60",))


def _haproxy_problem() -> str | None:
    from jinja2 import ChainableUndefined, Environment
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    environment = Environment(undefined=ChainableUndefined, autoescape=False)  # noqa: S701 - no HTML
    environment.filters["haproxy_fmt"] = str
    config = {"frontend_host": "::", "frontend_port": 1, "metrics_port": 2, "stats_port": 3}
    rendered = environment.from_string(HAPROXY_CONFIG_TEMPLATE).render(config=config)
    guard: GuardFields = {
        "bind_host": "*",
        "bind_options": "",
        "cert_file": None,
        "require_tls": False,
    }
    try:
        harden(rendered, guard)
    except UnexpectedConfiguration as error:
        return str(error)
    return None


ASGI_PORT: Final = Patch(
    name="app at a replica's port",
    target=_ray("serve._private.replica.start_asgi_http_server"),
    guard=all_of(
        has("ray.serve._private.replica:start_asgi_http_server"),
        takes(
            "ray.serve._private.http_util:start_asgi_http_server",
            *("app", "http_options", "event_loop", "enable_so_reuseport"),
        ),
    ),
    apply=replace_attributes,
    fallback="Serve's own app passes each request to ours, at more processor time",
)
GATE_PORT: Final = Patch(
    name="gate at a replica's port",
    target=ASGI_PORT.target,
    guard=ASGI_PORT.guard,
    apply=replace_attributes,
    fallback="an ingress with server.api_server 'rust' does not start",
    is_required=True,
)
GRPC_PORT: Final = Patch(
    name="address of a replica's gRPC server",
    target=_ray("serve._private.replica.add_port_to_grpc_server"),
    guard=all_of(
        takes("ray._common.tls_utils:add_port_to_grpc_server", "server", "address"),
        has("ray.serve._private.replica:add_port_to_grpc_server"),
        contains_text(
            "ray.serve._private.replica", 'add_port_to_grpc_server(self._server, "[::]:0")'
        ),
    ),
    apply=replace_attributes,
    fallback="no replica starts, for it would listen on all addresses",
    is_required=True,
)
SERVE_CONTROLLER: Final = Patch(
    name="calls of the Serve controller",
    target=_ray("serve._private.controller.ServeController", "DeploymentID"),
    guard=all_of(
        has(
            "ray.serve._private.constants:SERVE_CONTROLLER_NAME",
            "ray.serve._private.constants:SERVE_NAMESPACE",
            f"{_CONTROLLER}.update_deployment_replicas",
            f"{_CONTROLLER}.get_deployment_details",
            f"{_CONTROLLER}.graceful_shutdown",
        ),
        has_fields("ray.serve._private.common:DeploymentID", "name", "app_name"),
    ),
    fallback=_CALL_FAILS,
    is_required=True,
)
BROADCAST: Final = Patch(
    name="answers of all replicas",
    target=_ray("DeploymentBroadcastResponse._fetch_replica_results_async"),
    guard=has(
        "ray.serve.handle:DeploymentHandle.broadcast",
        "ray.serve.handle:DeploymentBroadcastResponse._fetch_replica_results_async",
    ),
    fallback=_CALL_FAILS,
    is_required=True,
)
MEMBERSHIP: Final = Patch(
    name="running replicas",
    target=_ray("ServeController.listen_for_change", "LongPollNamespace.DEPLOYMENT_TARGETS"),
    guard=all_of(
        has(
            f"{_CONTROLLER}.listen_for_change",
            "ray.serve._private.long_poll:LongPollNamespace.DEPLOYMENT_TARGETS",
        ),
        has_fields(
            "ray.serve._private.common:RunningReplicaInfo",
            *("replica_id", "replica_metadata", "node_ip"),
        ),
    ),
    fallback="an ingress learns of no replica",
    is_required=True,
)
DEPLOYMENT_OPTIONS: Final = Patch(
    name="options of a deployment",
    target=_ray("serve.Deployment.options(_internal)"),
    guard=takes("ray.serve.deployment:Deployment.options", "version", "_internal"),
    fallback="nothing is deployed",
    is_required=True,
)
NODE_OPTIONS: Final = Patch(
    name="options of a node",
    target=_ray("init(_temp_dir)", "init(_node_ip_address)"),
    guard=all_of(
        contains_text("ray._private.worker", '"_temp_dir"'),
        contains_text("ray._private.worker", '"_node_ip_address"'),
    ),
    fallback="no cluster starts",
    is_required=True,
)
ENVIRONMENT: Final = Patch(
    name="environment that Ray has read",
    target=_ray("_private.ray_constants.ENABLE_RAY_CLUSTER", "_raylet.AuthenticationTokenLoader"),
    guard=has(
        "ray._private.ray_constants:ENABLE_RAY_CLUSTER",
        "ray._raylet:Config.initialize",
        "ray._raylet:AuthenticationTokenLoader.instance",
    ),
    apply=replace_attributes,
    fallback="no cluster starts",
    is_required=True,
)
MESSAGES: Final = Patch(
    name="messages on standard error",
    target=_ray("_private.worker.print_to_stdstream"),
    guard=takes("ray._private.worker:print_to_stdstream", "data"),
    apply=replace_attributes,
    fallback="Ray prints its messages among the output of commands",
)
STORE: Final = Patch(
    name="store of the head",
    target=_ray("experimental.internal_kv", "_raylet.GcsClient"),
    guard=has(
        "ray.experimental.internal_kv:internal_kv_get_gcs_client",
        "ray._raylet:GcsClient",
        "ray._raylet:InnerGcsClient.internal_kv_put",
        "ray._raylet:InnerGcsClient.internal_kv_get",
        "ray._raylet:InnerGcsClient.internal_kv_keys",
        "ray._raylet:InnerGcsClient.internal_kv_del",
    ),
    fallback="an applied configuration is not kept",
    is_required=True,
)
AUTOSCALER: Final = Patch(
    name="state of the autoscaler",
    target=_ray("_private.state.state", "core.generated.autoscaler_pb2"),
    guard=has(
        "ray._private.state:state.get_cluster_config",
        "ray._private.state:state.actor_table",
        "ray._raylet:InnerGcsClient.get_cluster_status",
        "ray.core.generated.autoscaler_pb2:GetClusterStatusReply",
    ),
    fallback="baton finds no autoscaler, and refuses to start on too few nodes",
)
LOSSES: Final = Patch(
    name="tables of dead actors and nodes",
    target=_ray("_private.state.state", "core.generated.common_pb2.ActorDiedErrorContext"),
    guard=has(
        "ray._private.state:state.actor_table",
        "ray.core.generated.common_pb2:ActorDiedErrorContext.NODE_DIED",
        "ray.core.generated.common_pb2:ActorDiedErrorContext.WORKER_DIED",
        "ray._raylet:InnerGcsClient.get_all_node_info",
        "ray.core.generated.gcs_pb2:GcsNodeInfo",
    ),
    fallback="the end of a replica, or of a node, is not reported",
)
LOGS: Final = Patch(
    name="folder of logs",
    target=_ray("_private.worker._global_node", "_private.node.Node.get_logs_dir_path"),
    guard=has("ray._private.worker:_global_node", "ray._private.node:Node.get_logs_dir_path"),
    fallback=_CALL_FAILS,
    is_required=True,
)
HAPROXY_TEMPLATE: Final = Patch(
    name="HAProxy configuration",
    target=_ray("serve._private.haproxy_templates.HAPROXY_CONFIG_TEMPLATE"),
    guard=_haproxy_problem,
    fallback="HAProxy does not start, for its ports would be open",
    is_required=True,
)

PATCHES: Final = (
    ASGI_PORT,
    GATE_PORT,
    GRPC_PORT,
    SERVE_CONTROLLER,
    BROADCAST,
    MEMBERSHIP,
    DEPLOYMENT_OPTIONS,
    NODE_OPTIONS,
    ENVIRONMENT,
    MESSAGES,
    STORE,
    AUTOSCALER,
    LOSSES,
    LOGS,
    HAPROXY_TEMPLATE,
)
