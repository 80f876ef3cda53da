"""Private couplings stand in tables, and only `engine/vllm/patches` assigns to vLLM's names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.engine.vllm.patches import table
from baton.runtime.patch import Patch
from baton.serving.ray import couplings as ray_couplings
from baton.serving.versions import versions_tested
from baton.transfer import couplings as nixl_couplings
from tests.repo.project import ROOT

VLLM_ROOM = ROOT / "platform" / "baton" / "engine" / "vllm"
ALL = (*table.PATCHES, *ray_couplings.PATCHES, *nixl_couplings.PATCHES)
MESSAGES = frozenset(
    {
        *("EngineCoreOutput", "EngineCoreRequest", "IterationStats", "LoRARequest"),
        *("PrefillStats", "SamplingParams"),
    }
)
"""Values of vLLM that baton makes or was handed to send on; their fields are there to be set."""
BUILTINS = frozenset({"setattr", "delattr"})
PATCHING = frozenset({"replace_attributes", "wrap_attribute"})
"""These assign what the row that calls them has proved."""


def assignments(source: str) -> Iterator[str]:
    """Assignments to attributes of objects that are, or may be, vLLM's."""
    tree = ast.parse(source)
    foreign = imported_names(tree)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            foreign_names = foreign | foreign_arguments(function, foreign)
            yield from assigned_in(function.body, foreign_names)
    yield from assigned_in(
        [node for node in tree.body if not isinstance(node, ast.ClassDef | ast.FunctionDef)],
        foreign,
    )


def imported_names(tree: ast.Module) -> frozenset[str]:
    """Names that a module has from vLLM, besides its messages; `Any` and `VllmObject` hide them."""
    names = {"Any", "VllmObject", "ModuleType"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias for alias in node.names if alias.name.split(".")[0] == "vllm"]
            names.update(alias.asname or "vllm" for alias in modules)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {
            *("fastapi", "vllm", "prometheus_fastapi_instrumentator"),
        }:
            names.update(alias.asname or alias.name for alias in node.names)
    return frozenset(names - MESSAGES)


def foreign_arguments(
    function: ast.FunctionDef | ast.AsyncFunctionDef, foreign: frozenset[str]
) -> frozenset[str]:
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return frozenset(
        argument.arg
        for argument in arguments
        if argument.annotation is not None
        and any(
            isinstance(node, ast.Name) and node.id in foreign
            for node in ast.walk(argument.annotation)
        )
    )


def assigned_in(body: list[ast.stmt], foreign: frozenset[str]) -> Iterator[str]:
    """Targets whose root is foreign, or a name that a foreign expression was bound to."""
    names = set(foreign)
    for node in (found for statement in body for found in ast.walk(statement)):
        match node:
            case ast.For(target=target, iter=value) | ast.NamedExpr(target=target, value=value):
                targets = [target]
            case ast.Assign(targets=targets, value=value):
                pass
            case _:
                continue
        if is_foreign(value, names):
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    for node in (found for statement in body for found in ast.walk(statement)):
        for target in assigned_objects(node):
            if is_foreign(target, names) or is_deep_attribute_of_self(target):
                yield ast.unparse(node).splitlines()[0]


def assigned_objects(node: ast.AST) -> Iterator[ast.expr]:
    """The objects of which a statement or call sets or deletes an attribute."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            nested = targets
        case ast.AugAssign() | ast.AnnAssign():
            nested = [node.target]
        case ast.Call(func=ast.Name(id=name), args=[owner, *_]) if name in BUILTINS | PATCHING:
            yield owner
            return
        case _:
            return
    for target in nested:
        elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        for element in elements:
            match element:
                case ast.Attribute(value=owner):
                    yield owner
                case ast.Subscript(value=ast.Call(func=ast.Name(id="vars"), args=[owner])):
                    yield owner
                case _:
                    pass


COLLECTIONS = (ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp, ast.IfExp)


def is_foreign(expression: ast.expr, names: set[str]) -> bool:
    if isinstance(expression, COLLECTIONS):
        return any(isinstance(node, ast.Name) and node.id in names for node in ast.walk(expression))
    root = expression
    while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
        match root:
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, *_]):
                root = owner
            case ast.Call(func=function):
                root = function
            case _:
                root = root.value
    return isinstance(root, ast.Name) and root.id in names


OWN_OBJECTS = frozenset({"_gate", "_llm", "_callers", "exchange"})
"""Attributes of `self` that hold objects of baton's."""


def is_deep_attribute_of_self(expression: ast.expr) -> bool:
    """Whether it is an object that `self` holds, and that is not known to be baton's."""
    return (
        isinstance(expression, ast.Attribute)
        and isinstance(expression.value, ast.Name)
        and expression.value.id == "self"
        and expression.attr not in OWN_OBJECTS
    )


ALLOWED = {
    "fast_path/detokenizer_tail.py": ("replace_attributes(detokenizer, stream=stream)",),
    "fast_path/stream_bypass.py": (
        "replace_attributes(state, make_request_output=self._make_request_output)",
    ),
    "frontend/rust_grammars.py": ("replace_attributes(params.structured_outputs, _backend=None)",),
}
"""Objects of one request: their row was proved when the app was built."""


def modules() -> list[Path]:
    return [path for path in sorted(VLLM_ROOM.rglob("*.py")) if path.parent.name != "patches"]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(VLLM_ROOM)))
def test_only_the_patches_assign_to_names_of_vllm(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(VLLM_ROOM)), ())
    assert set(assignments(path.read_text())) <= set(allowed)


@pytest.mark.parametrize(
    "line",
    [
        "client.add_request_async = own",
        "setattr(client, 'add_request_async', own)",
        "delattr(client, 'add_request_async')",
        "client.resources.task = own",
        "vars(client)['add_request_async'] = own",
        "del client.add_request_async",
        "resources = client.resources; resources.task = own",
        "Scheduler.schedule = own",
        "core.EngineCore.step = own",
        "core.limit += 1",
        "replace_attributes(client, task=own)",
        "self._client.task = own",
        "for route in client.routes: route.app = own",
        "routes = [route for route in client.routes]; routes[0].app = own",
        "handler = getattr(client, 'handler', None); handler.search = own",
        "if handler := client.handler: handler.search = own",
    ],
)
def test_an_assignment_that_is_added_is_found(line: str) -> None:
    source = (
        "from vllm.v1.engine import core\n"
        "from vllm.v1.core.sched.scheduler import Scheduler\n"
        "class Frontend:\n"
        "    def install(self, client: Any, own: Own) -> None:\n"
        f"        {line}\n"
    )
    assert list(assignments(source))


@pytest.mark.parametrize("line", ["self.client = client", "own.task = client", "task = client"])
def test_an_assignment_to_objects_of_batons_is_not(line: str) -> None:
    source = f"class A:\n    def f(self, client: Any, own: Own) -> None:\n        {line}\n"
    assert list(assignments(source)) == []


def test_every_row_has_a_name_and_says_what_happens_without_it() -> None:
    assert len({patch.name for patch in ALL}) == len(ALL)
    assert all(patch.target.names and patch.fallback for patch in ALL)


def test_every_row_of_a_table_is_in_its_list() -> None:
    for module in (table, ray_couplings, nixl_couplings):
        rows = {id(value) for value in vars(module).values() if isinstance(value, Patch)}
        assert rows == {id(patch) for patch in module.PATCHES}


@pytest.mark.parametrize("package", ["vllm", "ray", "nixl"])
def test_rows_were_tested_with_the_versions_of_this_release(package: str) -> None:
    tested = {patch.target.tested for patch in ALL if patch.target.package == package}
    assert tested == {versions_tested(package)}


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_rows_of_other_packages_were_tested_with_the_locked_versions(lock: str) -> None:
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    locked = dict(line.split()[0].split("==") for line in lines if "==" in line and line[0] != " ")
    for patch in ALL:
        if (version := locked.get(patch.target.package)) is not None:
            assert version.startswith(tuple(f"{tested}." for tested in patch.target.tested))
