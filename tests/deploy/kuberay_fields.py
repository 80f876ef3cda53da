"""Which fields a RayService has, as far as we use them, and of what kind each is.

Source: KubeRay's API reference, `ray.io/v1`, of operator 1.5 and later. KubeRay's own schemas (its
CRDs) are not part of any package that we could fetch; `scripts/check-deploy --crds FOLDER` checks
against them where somebody has them. Pod templates are checked against Kubernetes' own schema.
"""

from __future__ import annotations

from typing import Final

Schema = dict[str, object]

_STRING: Final[Schema] = {"type": "string"}
_STRING_MAP: Final[Schema] = {"type": "object", "additionalProperties": _STRING}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_BOOLEAN: Final[Schema] = {"type": "boolean"}
_ANYTHING: Final[Schema] = {"type": "object"}


def _closed(properties: dict[str, Schema], *required: str) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(required),
    }


_GROUP: Final[dict[str, Schema]] = {
    "rayStartParams": _STRING_MAP,
    "resources": _STRING_MAP,
    "labels": _STRING_MAP,
    "template": _ANYTHING,
}
_HEAD: Final = _closed(
    _GROUP
    | {
        "headService": _ANYTHING,
        "enableIngress": _BOOLEAN,
        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
    },
    "template",
)
_WORKERS: Final = _closed(
    _GROUP
    | {
        "suspend": _BOOLEAN,
        "groupName": _STRING,
        "replicas": _COUNT,
        "minReplicas": _COUNT,
        "maxReplicas": _COUNT,
        "idleTimeoutSeconds": _COUNT,
        "numOfHosts": {"type": "integer", "minimum": 1},
        "scaleStrategy": _ANYTHING,
    },
    "groupName",
    "minReplicas",
    "maxReplicas",
    "template",
)
_AUTOSCALER: Final = _closed(
    {
        "resources": _closed(
            {"requests": _STRING_MAP, "limits": _STRING_MAP, "claims": {"type": "array"}}
        ),
        "image": _STRING,
        "imagePullPolicy": {"enum": ["Always", "Never", "IfNotPresent"]},
        "securityContext": _ANYTHING,
        "idleTimeoutSeconds": _COUNT,
        "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
        "version": {"enum": ["v1", "v2"]},
        "env": {"type": "array"},
        "envFrom": {"type": "array"},
        "volumeMounts": {"type": "array"},
    }
)
_CLUSTER: Final = _closed(
    {
        "suspend": _BOOLEAN,
        "managedBy": _STRING,
        "authOptions": _closed({"mode": {"enum": ["token", "disabled"]}}, "mode"),
        "autoscalerOptions": _AUTOSCALER,
        "headServiceAnnotations": _STRING_MAP,
        "enableInTreeAutoscaling": _BOOLEAN,
        "gcsFaultToleranceOptions": _closed(
            {
                "redisUsername": _ANYTHING,
                "redisPassword": _ANYTHING,
                "externalStorageNamespace": _STRING,
                "redisAddress": _STRING,
            },
            "redisAddress",
        ),
        "headGroupSpec": _HEAD,
        "rayVersion": _STRING,
        "workerGroupSpecs": {"type": "array", "items": _WORKERS, "minItems": 1},
    },
    "headGroupSpec",
)
RAY_SERVICE: Final = _closed(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayService"},
        "metadata": _closed(
            {
                "name": _STRING,
                "namespace": _STRING,
                "labels": _STRING_MAP,
                "annotations": _STRING_MAP,
            },
            "name",
        ),
        "spec": _closed(
            {
                "serveService": _ANYTHING,
                "upgradeStrategy": _ANYTHING,
                "serveConfigV2": _STRING,
                "rayClusterConfig": _CLUSTER,
                "excludeHeadPodFromServeSvc": _BOOLEAN,
            },
            "serveConfigV2",
            "rayClusterConfig",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
