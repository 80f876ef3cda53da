"""Check manifests against CRDs: `python -m tests.deploy.against_crds CRDS FOLDER...`.

A CRD's schema lets unknown fields pass, for Kubernetes drops them; here they are errors.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from tests.deploy.python_checks import documents, objects, of_schema

Schema = dict[str, object]


def schemas(folder: Path) -> dict[tuple[str, str], Schema]:
    """Schemas by API version and kind, without room for fields that they do not name."""
    found: dict[tuple[str, str], Schema] = {}
    for path in sorted(folder.glob("*.yaml")):
        for document in documents(path):
            if document.get("kind") != "CustomResourceDefinition":
                continue
            spec = cast("dict[str, object]", document["spec"])
            kind = cast("dict[str, str]", spec["names"])["kind"]
            for version in cast("list[dict[str, object]]", spec["versions"]):
                schema = cast("dict[str, Schema]", version["schema"])["openAPIV3Schema"]
                of = f"{spec['group']}/{version['name']}", kind
                found[of] = cast("Schema", closed(schema))
    return found


def closed(schema: object) -> object:
    """The same, but fields that are not named are errors; object metadata is left as it is."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    names = schema.get("properties")
    keeps = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(names, Mapping) and names and not keeps and schema.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def findings(known: Mapping[tuple[str, str], Schema], folder: Path) -> list[str]:
    """What of a folder's objects does not fit the schema of its kind, where there is one."""
    found = []
    for one in objects(folder):
        schema = known.get((str(one["apiVersion"]), str(one["kind"])))
        if schema is not None:
            found += [f"{folder}: {one['kind']}: {line}" for line in of_schema(one, schema)]
    return found


def main() -> int:
    """0 when everything fits."""
    if len(sys.argv) < 3:
        sys.stderr.write("usage: python -m tests.deploy.against_crds CRDS FOLDER...\n")
        return 2
    known = schemas(Path(sys.argv[1]))
    kinds = ", ".join(sorted(kind for _, kind in known)) or "none"
    sys.stderr.write(f"against CRDs of: {kinds}\n")
    found = [line for name in sys.argv[2:] for line in findings(known, Path(name))]
    for line in found:
        sys.stderr.write(f"{line}\n")
    return 1 if found or not known else 0


if __name__ == "__main__":
    sys.exit(main())
