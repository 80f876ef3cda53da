"""Check manifests against CRDs: `python -m tests.deploy.against_crds CRDS FOLDER...`.

A CRD's schema lets unknown fields pass, for Kubernetes drops them; here they are errors.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from tests.deploy.python_checks import documents, objects, schema_errors

Schema = dict[str, object]


def schemas(folder: Path) -> dict[tuple[str, str], Schema]:
    """Schemas by API version and kind, without room for fields that they do not name."""
    schemas_by_kind: dict[tuple[str, str], Schema] = {}
    for path in sorted(folder.glob("*.yaml")):
        for document in documents(path):
            if document.get("kind") != "CustomResourceDefinition":
                continue
            spec = cast("dict[str, object]", document["spec"])
            kind = cast("dict[str, str]", spec["names"])["kind"]
            for version in cast("list[dict[str, object]]", spec["versions"]):
                schema = cast("dict[str, Schema]", version["schema"])["openAPIV3Schema"]
                version_and_kind = f"{spec['group']}/{version['name']}", kind
                schemas_by_kind[version_and_kind] = cast("Schema", close_schema(schema))
    return schemas_by_kind


def close_schema(schema: object) -> object:
    """The same, but fields that are not named are errors; object metadata is left as it is."""
    if isinstance(schema, list):
        return [close_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: close_schema(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("anyOf", None)
        closed["type"] = ["integer", "string"]
    names = schema.get("properties")
    keeps_unknown = schema.get("x-kubernetes-preserve-unknown-fields")
    if (
        isinstance(names, Mapping)
        and names
        and not keeps_unknown
        and schema.get("type") == "object"
    ):
        closed.setdefault("additionalProperties", False)
    return closed


def find_mismatches(schemas_by_kind: Mapping[tuple[str, str], Schema], folder: Path) -> list[str]:
    """What of a folder's objects does not fit the schema of its kind, where there is one."""
    mismatches = []
    for object_ in objects(folder):
        schema = schemas_by_kind.get((str(object_["apiVersion"]), str(object_["kind"])))
        if schema is not None:
            mismatches += [
                f"{folder}: {object_['kind']}: {line}" for line in schema_errors(object_, schema)
            ]
    return mismatches


def main() -> int:
    """0 when everything fits."""
    if len(sys.argv) < 3:
        sys.stderr.write("usage: python -m tests.deploy.against_crds CRDS FOLDER...\n")
        return 2
    schemas_by_kind = schemas(Path(sys.argv[1]))
    kinds = ", ".join(sorted(kind for _, kind in schemas_by_kind)) or "none"
    sys.stderr.write(f"against CRDs of: {kinds}\n")
    mismatches = [
        line for name in sys.argv[2:] for line in find_mismatches(schemas_by_kind, Path(name))
    ]
    for line in mismatches:
        sys.stderr.write(f"{line}\n")
    return 1 if mismatches or not schemas_by_kind else 0


if __name__ == "__main__":
    sys.exit(main())
