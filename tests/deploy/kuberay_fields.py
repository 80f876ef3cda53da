"""Which fields a RayService has, as far as we use them, and of what kind each is.

Source: KubeRay's API reference, `ray.io/v1`, of operator 1.5 and later. KubeRay's own schemas (its
CRDs) are not part of any package that we could fetch; `scripts/check-deploy --crds FOLDER` checks
against them where somebody has them. Pod templates are checked against Kubernetes' own schema.
"""

from __future__ import annotations

from typing import Final

Schema = dict[str, object]

_TEXT: Final[Schema] = {"type": "string"}
_TEXTS: Final[Schema] = {"type": "object", "additionalProperties": _TEXT}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_FLAG: Final[Schema] = {"type": "boolean"}
_ANYTHING: Final[Schema] = {"type": "object"}


def _closed(properties: dict[str, Schema], *required: str) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(required),
    }


_GROUP: Final[dict[str, Schema]] = {
    "rayStartParams": _TEXTS,
    "resources": _TEXTS,
    "labels": _TEXTS,
    "template": _ANYTHING,
}
_HEAD: Final = _closed(
    _GROUP
    | {
        "headService": _ANYTHING,
        "enableIngress": _FLAG,
        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
    },
    "template",
)
_WORKERS: Final = _closed(
    _GROUP
    | {
        "suspend": _FLAG,
        "groupName": _TEXT,
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
        "resources": _closed({"requests": _TEXTS, "limits": _TEXTS, "claims": {"type": "array"}}),
        "image": _TEXT,
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
        "suspend": _FLAG,
        "managedBy": _TEXT,
        "authOptions": _closed({"mode": {"enum": ["token", "disabled"]}}, "mode"),
        "autoscalerOptions": _AUTOSCALER,
        "headServiceAnnotations": _TEXTS,
        "enableInTreeAutoscaling": _FLAG,
        "gcsFaultToleranceOptions": _closed(
            {
                "redisUsername": _ANYTHING,
                "redisPassword": _ANYTHING,
                "externalStorageNamespace": _TEXT,
                "redisAddress": _TEXT,
            },
            "redisAddress",
        ),
        "headGroupSpec": _HEAD,
        "rayVersion": _TEXT,
        "workerGroupSpecs": {"type": "array", "items": _WORKERS, "minItems": 1},
    },
    "headGroupSpec",
)
RAY_SERVICE: Final = _closed(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayService"},
        "metadata": _closed(
            {"name": _TEXT, "namespace": _TEXT, "labels": _TEXTS, "annotations": _TEXTS}, "name"
        ),
        "spec": _closed(
            {
                "serveService": _ANYTHING,
                "upgradeStrategy": _ANYTHING,
                "serveConfigV2": _TEXT,
                "rayClusterConfig": _CLUSTER,
                "excludeHeadPodFromServeSvc": _FLAG,
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
