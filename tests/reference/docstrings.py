"""What the source says below each attribute: `key: int = 1`, and on the next line a string.

Python keeps no such strings at run time, so they are read from the source.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping


def attribute_docs(cls: type) -> Mapping[str, str]:
    """The text below each attribute of a class and its bases, on one line each."""
    docs: dict[str, str] = {}
    for other in reversed(cls.__mro__):
        if other.__module__.startswith("baton."):
            docs |= _own_docs(other)
    return docs


def class_doc(cls: type) -> str:
    """The first paragraph of a class' docstring, on one line."""
    return one_line(inspect.getdoc(cls) or "")


def one_line(text: str) -> str:
    """The first paragraph of a text, on one line, without where a figure comes from."""
    paragraph = inspect.cleandoc(text).split("\n\n")[0]
    return " ".join(paragraph.split()).split(" Source:")[0]


@functools.cache
def _own_docs(cls: type) -> Mapping[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef), f"{cls} is defined by something else than a class"
    return {
        _name(before): one_line(after.value.value)
        for before, after in zip(tree.body, tree.body[1:], strict=False)
        if _name(before)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }


def _name(statement: ast.stmt) -> str:
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case _:
            return ""
