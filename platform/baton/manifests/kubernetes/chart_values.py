"""Values of the Helm chart: each one's default, JSON schema and comment, in one tree.

`values.yaml` and `values.schema.json` come from it, so that no value lacks a comment or a schema.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from baton.config.derive.start_deadlines import weights_bytes
from baton.config.write.yaml_writer import yaml_text
from baton.manifests.cluster_deployment import ClusterDeployment, PlainDict
from baton.manifests.environment import ray_variables
from baton.manifests.images import image_name
from baton.manifests.kubernetes.kuberay import AUTOSCALER_OPTIONS
from baton.manifests.node_groups import front_group, head_group, round_up_to_mib
from baton.manifests.pods import (
    POD_SECURITY,
    RAYLET_HEALTH_COMMAND,
    RDMA_RESOURCE,
    memory_request,
    models_dir,
)
from baton.manifests.settings import ManifestSettings
from baton.telemetry.rules.render import RUNBOOK_BASE_PATTERN

_COMMENT_WIDTH: Final = 100
_MIB: Final = 1024**2
_TEXT: Final[PlainDict] = {"type": "string"}
_FLAG: Final[PlainDict] = {"type": "boolean"}
_OBJECT: Final[PlainDict] = {"type": "object"}
_TEXT_MAP: Final[PlainDict] = {"type": "object", "additionalProperties": _TEXT}
_OBJECTS: Final[PlainDict] = {"type": "array", "items": _OBJECT}
_TEXTS: Final[PlainDict] = {"type": "array", "items": _TEXT}
_NAME: Final[PlainDict] = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"}
_SCHEDULING_SCHEMAS: Final[Mapping[str, PlainDict]] = {
    "nodeSelector": _TEXT_MAP,
    "tolerations": _OBJECTS,
    "affinity": _OBJECT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One value."""

    comment: str
    default: object
    schema: PlainDict

    def lines(self, name: str) -> Iterator[str]:
        """Its lines of `values.yaml`."""
        yield from _comment_lines(self.comment)
        yield from yaml_text({name: self.default}).splitlines()

    def json_schema(self) -> PlainDict:
        """Its JSON schema."""
        return self.schema | {"description": self.comment}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Values below one key; no other keys are accepted, and none may be unset."""

    comment: str
    entries: Mapping[str, Value | Section]

    def lines(self, name: str) -> Iterator[str]:
        """Its lines of `values.yaml`."""
        yield from _comment_lines(self.comment)
        yield f"{name}:"
        for key, entry in self.entries.items():
            yield from (f"  {line}".rstrip() for line in entry.lines(key))

    def json_schema(self) -> PlainDict:
        """Its JSON schema."""
        return {
            "type": "object",
            "description": self.comment,
            "additionalProperties": False,
            "required": list(self.entries),
            "properties": {name: entry.json_schema() for name, entry in self.entries.items()},
        }


def values_file(values: Section) -> str:
    """`values.yaml`, with each value below its comment."""
    texts = ("\n".join(entry.lines(name)) for name, entry in values.entries.items())
    return "\n\n".join(texts) + "\n"


def values_schema(values: Section) -> PlainDict:
    """`values.schema.json`."""
    schema = values.json_schema()
    properties = schema["properties"]
    assert isinstance(properties, dict), "a section has properties"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        # Helm adds it to the values of a chart that another chart includes.
        "properties": properties | {"global": _OBJECT},
    }


def _comment_lines(comment: str) -> list[str]:
    return textwrap.wrap(
        comment, _COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def chart_values(
    deployment: ClusterDeployment,
    settings: ManifestSettings,
    *,
    config: PlainDict,
    config_schema: PlainDict,
) -> Section:
    """All values, with defaults for one deployment."""
    return Section(
        comment="Values of the chart.",
        entries={
            "nameOverride": Value(
                comment="Replaces 'baton' in labels, and follows the release in names of objects;"
                " empty: objects have the release's name.",
                default="",
                schema=_NAME,
            ),
            "fullnameOverride": Value(
                comment="Name of the deployment and prefix of all names; empty: see nameOverride.",
                default="",
                schema=_NAME,
            ),
            "image": _image(image_name(deployment, settings)),
            "config": Value(
                comment="The configuration of baton, as in docs/reference/configuration.md.",
                default=config,
                schema=config_schema,
            ),
            **_network_values(),
            **_pod_values(deployment, settings),
            "monitoring": Value(
                comment="Whether to create monitors and rules of the Prometheus operator.",
                default=True,
                schema=_FLAG,
            ),
            "runbooks": Value(
                comment="URL of a copy of docs/operations/runbooks, to which alerts link; empty:"
                " alerts name the page, without a link.",
                default=settings.runbook_base or "",
                schema={"type": "string", "pattern": f"^({RUNBOOK_BASE_PATTERN})?$"},
            ),
            "redis": Value(
                comment="KubeRay's gcsFaultToleranceOptions, such as redisAddress; empty: the head"
                " keeps its state in memory.",
                default={},
                schema=_OBJECT,
            ),
            "autoscaler": Value(
                comment="KubeRay's autoscalerOptions.", default=AUTOSCALER_OPTIONS, schema=_OBJECT
            ),
        },
    )


def _image(name: str) -> Section:
    tagged, _, digest = name.partition("@")
    repository, colon, tag = tagged.rpartition(":")
    if not colon or "/" in tag:  # a colon of the registry's port
        repository, tag = tagged, ""
    return Section(
        comment="The image of all pods.",
        entries={
            "repository": Value(
                comment="Registry and name, as registry.example.com/baton.",
                default=repository,
                schema=_TEXT | {"minLength": 1},
            ),
            "tag": Value(comment="Its tag; empty: none.", default=tag, schema=_TEXT),
            "digest": Value(
                comment="Its digest, as sha256:...; empty: none.", default=digest, schema=_TEXT
            ),
            "pullPolicy": Value(
                comment="Always, IfNotPresent or Never; empty: the default of Kubernetes.",
                default="",
                schema={"enum": ["", "Always", "IfNotPresent", "Never"]},
            ),
            "pullSecrets": Value(
                comment="Secrets of its registry, as [{name: registry}].",
                default=[],
                schema=_OBJECTS,
            ),
        },
    )


def _network_values() -> Mapping[str, Value | Section]:
    return {
        "service": Section(
            comment="The service of the API; its port is config.server.port.",
            entries={
                "type": Value(
                    comment="ClusterIP, NodePort or LoadBalancer.",
                    default="ClusterIP",
                    schema={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                ),
                "annotations": Value(
                    comment="Its annotations, such as those of a cloud's load balancer.",
                    default={},
                    schema=_TEXT_MAP,
                ),
            },
        ),
        "ingress": Section(
            comment="An Ingress before the service of the API.",
            entries={
                "enabled": Value(comment="Whether to create it.", default=False, schema=_FLAG),
                "className": Value(
                    comment="Its IngressClass; empty: the cluster's default.",
                    default="",
                    schema=_TEXT,
                ),
                "annotations": Value(
                    comment="Its annotations. Raise the controller's limits: of bodies to"
                    " config.admission.max_body, of an idle stream to a minute and more.",
                    default={},
                    schema=_TEXT_MAP,
                ),
                "hosts": Value(
                    comment="Its host names, as [llm.example.com]; empty: any.",
                    default=[],
                    schema=_TEXTS,
                ),
                "tls": Value(
                    comment="Its certificates, as [{secretName: llm-tls, hosts:"
                    " [llm.example.com]}].",
                    default=[],
                    schema=_OBJECTS,
                ),
            },
        ),
    }


def _pod_values(
    deployment: ClusterDeployment, settings: ManifestSettings
) -> Mapping[str, Value | Section]:
    config = deployment.config
    return {
        "serviceAccount": Section(
            comment="The service account of all pods. Only the head's pod, where Ray's autoscaler"
            " runs, gets its token.",
            entries={
                "create": Value(comment="Whether to create it.", default=False, schema=_FLAG),
                "name": Value(
                    comment="Its name; empty: the deployment's name if it is created, else KubeRay"
                    " makes one for the head alone.",
                    default="",
                    schema=_TEXT,
                ),
                "annotations": Value(
                    comment="Its annotations, such as an identity of the cloud.",
                    default={},
                    schema=_TEXT_MAP,
                ),
            },
        ),
        "extraEnv": Value(
            comment="Further environment variables of all pods: [{name: X, value: x}], or with"
            " valueFrom. Variables of one pool are in config.pools.POOL.env.",
            default=[],
            schema={
                "type": "array",
                "items": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
            },
        ),
        "environment": Value(
            comment="Variables of Ray and Ray Serve; they follow from the configuration.",
            default=ray_variables(config) | {"HF_HOME": models_dir(config)},
            schema=_TEXT_MAP,
        ),
        "scheduling": _scheduling(),
        "gpu": _gpu(settings),
        "rdma": Section(
            comment="Network cards for KV transfers.",
            entries={
                "enabled": Value(
                    comment="Whether pods with GPUs get one, as with config.transfer.require_rdma.",
                    default=config.transfer.require_rdma,
                    schema=_FLAG,
                ),
                "resource": Value(
                    comment="Its name as a resource of nodes.", default=RDMA_RESOURCE, schema=_TEXT
                ),
            },
        ),
        "memory": _memory(deployment),
        "podSecurityContext": Value(
            comment="The security context of all pods.", default=POD_SECURITY, schema=_OBJECT
        ),
        "probe": Section(
            comment="The probe of a pod's Ray node.",
            entries={
                "command": Value(
                    comment="Exits with 0 while the node is alive.",
                    default=RAYLET_HEALTH_COMMAND,
                    schema=_TEXTS,
                )
            },
        ),
    }


def _scheduling() -> Section:
    def by_group(comment: str) -> Section:
        comments = {
            "nodeSelector": "Labels of their nodes.",
            "tolerations": "Tolerations of their pods.",
            "affinity": "Affinity of their pods.",
        }
        return Section(
            comment=comment,
            entries={
                key: Value(
                    comment=comments[key],
                    default=[] if schema is _OBJECTS else {},
                    schema=schema,
                )
                for key, schema in _SCHEDULING_SCHEMAS.items()
            },
        )

    pool_schema: PlainDict = {
        "type": "object",
        "additionalProperties": False,
        "properties": dict(_SCHEDULING_SCHEMAS),
    }
    return Section(
        comment="Nodes of each group of pods. A pool gets the selectors and tolerations of gpu (if"
        " it has GPUs), of its role and of its name together, and the most specific affinity.",
        entries={
            "head": by_group("The head, with Ray's store and baton's controller."),
            "ingress": by_group("The ingresses."),
            "prefill": by_group("Pools with the role prefill."),
            "decode": by_group("Pools with the role decode."),
            "mixed": by_group("Pools with the role mixed."),
            "pools": Value(
                comment="The same by name of a pool, as {decode: {nodeSelector: {rack: r7}}}.",
                default={},
                schema={"type": "object", "additionalProperties": pool_schema},
            ),
        },
    )


def _gpu(settings: ManifestSettings) -> Section:
    return Section(
        comment="Nodes with GPUs.",
        entries={
            "perNode": Value(
                comment="GPUs of a node; replicas with more span several nodes.",
                default=settings.gpus_per_node,
                schema={"type": "integer", "minimum": 1},
            ),
            "nodeSelector": Value(
                comment='Labels of nodes for pods with GPUs, as {nvidia.com/gpu.present: "true"}.',
                default={},
                schema=_TEXT_MAP,
            ),
            "tolerations": Value(
                comment="Tolerations of pods with GPUs.", default=[], schema=_OBJECTS
            ),
        },
    )


def _memory(deployment: ClusterDeployment) -> Section:
    config = deployment.config
    weights = {
        model.source: f"{round_up_to_mib(known_bytes) // _MIB}MiB"
        for model in config.models.values()
        if (known_bytes := weights_bytes(model.source)) is not None
    }
    return Section(
        comment="Memory requests. Those of pools follow from weights, workers and"
        " engine.offload.host_memory; config.pools.POOL.resources.memory sets one.",
        entries={
            "head": Value(
                comment="Of the head.", default=memory_request(head_group()), schema=_TEXT
            ),
            "ingress": Value(
                comment="Of an ingress, with room for its replacement.",
                default=memory_request(front_group(config)),
                schema=_TEXT,
            ),
            "weights": Value(
                comment="Size of weights by source of a model, as {org/model: 15GiB}. Pods that"
                " download them request as much disk. Left out: unknown.",
                default=weights,
                schema=_TEXT_MAP,
            ),
        },
    )
