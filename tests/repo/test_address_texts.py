"""Nobody but `baton.domain.names.addresses` joins or parts a host and a port: IPv6 has colons."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.repo.project import ROOT

THE_PLACE = "platform/baton/domain/names/addresses.py"
SOCKETS = {"platform/baton/runtime/process/sockets.py", "platform/baton/serving/replica/engines.py"}
"""Who asks which version of IP an address is of, for a socket or for one of this machine."""
_HOST = re.compile(r"host|addr|\bip\b|_ip\b|\bnode\b|bind\b|netloc|authority", re.IGNORECASE)
_PORT = re.compile(r"port", re.IGNORECASE)
_PARTINGS = frozenset({"partition", "rpartition", "split", "rsplit"})


def findings(source: str, *, sockets: bool = False) -> Iterator[str]:
    """What in a module handles addresses by itself."""
    for node in ast.walk(ast.parse(source)):
        where = f"line {getattr(node, 'lineno', 0)}"
        match node:
            case ast.JoinedStr(values=parts) if _joins(parts):
                yield f"{where}: {ast.unparse(node)}"
            case ast.Call(func=ast.Attribute(value=text, attr=name), args=[ast.Constant(":"), *_]):
                if name in _PARTINGS and _HOST.search(ast.unparse(text)):
                    yield f"{where}: {ast.unparse(node)}"
            case ast.Compare(left=ast.Constant(":"), comparators=[text]):
                if _HOST.search(ast.unparse(text)):
                    yield f"{where}: {ast.unparse(node)}"
            case ast.BinOp(left=left, op=ast.Add(), right=ast.Constant(str() as colon)):
                if colon.startswith(":") and _HOST.search(ast.unparse(left)):
                    yield f"{where}: {ast.unparse(node)}"
            case ast.Attribute(attr="AF_INET" | "AF_INET6") if not sockets:
                yield f"{where}: {ast.unparse(node)}"


def _joins(parts: list[ast.expr]) -> bool:
    """Whether an f-string puts a colon between a host and a port, or brackets around a host."""
    for before, value, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
        if not isinstance(value, ast.FormattedValue):
            continue
        text = ast.unparse(value.value)
        opening = before.value if isinstance(before, ast.Constant) else ""
        closing = after.value if isinstance(after, ast.Constant) else ""
        assert isinstance(opening, str)
        assert isinstance(closing, str)
        is_host = bool(_HOST.search(text)) or opening.endswith("://")
        if opening.endswith(":") and not opening.endswith("::") and _PORT.search(text):
            index = parts.index(value)
            if index >= 2 and opening == ":" and isinstance(parts[index - 2], ast.FormattedValue):
                return True
        if is_host and re.match(r":\d|:PORT\b", closing):
            return True
        if is_host and opening.endswith("[") and closing.startswith("]"):
            return True
    return False


@pytest.mark.parametrize(
    "source",
    [
        'f"{host}:{port}"',
        'f"tcp://{host}:0"',
        'f"cannot listen on {options.host}:{options.port}: {error}"',
        'f"{scheme}://{name}:{server.port}/x"',
        'f"{scheme}://{name}:8000"',
        'f"[{host}]"',
        'host + ":" + str(port)',
        'address.rpartition(":")[0]',
        'self._address.rsplit(":", 1)',
        'socket.AF_INET6 if ":" in host else 4',
    ],
)
def test_an_address_that_is_made_or_parted_elsewhere_is_found(source: str) -> None:
    assert list(findings(source))


@pytest.mark.parametrize(
    "source",
    [
        'f"{type(error).__name__}: {error}"',
        'f"http://127.0.0.1:{port}"',
        'f"{address_text(host, port)}: the port is in use"',
        'f"http://{address}/metrics"',
        'f"{names[0]}: {host}"',
        'name.partition(":")',
    ],
)
def test_text_that_only_looks_like_an_address_is_no_finding(source: str) -> None:
    assert not list(findings(source))


@pytest.mark.parametrize("folder", ["platform", "benchmarks", "scripts"])
def test_addresses_are_made_and_parted_at_one_place(folder: str) -> None:
    found = [
        f"{name}, {finding}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (name := str(path.relative_to(ROOT))) != THE_PLACE
        for finding in findings(path.read_text(), sockets=name in SOCKETS)
    ]
    assert not found, "use baton.domain.names.addresses:\n" + "\n".join(found)


def test_allowed_places_still_exist() -> None:
    for name in (THE_PLACE, *SOCKETS):
        source = (ROOT / name).read_text()
        assert list(findings(source)), f"{name} no longer needs to be allowed"
