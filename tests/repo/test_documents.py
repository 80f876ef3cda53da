"""What the documents show can be run, and where they point to exists."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from ruamel.yaml import YAML

from baton.config.load import load_config
from tests.repo.project import ROOT, CodeBlock, code_blocks, documents

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_MAKE = re.compile(r"\bmake ([a-z][a-z-]*)")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ (.+)$", without_code(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in headings}


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_there_are_blocks_to_check() -> None:
    assert {block.file for block in code_blocks("bash")} >= {"README.md", "CONTRIBUTING.md"}


@pytest.mark.parametrize("block", code_blocks("bash"), ids=str)
def test_a_shell_block_is_valid_shell(block: CodeBlock) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False, timeout=10
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", code_blocks("python"), ids=str)
def test_a_python_block_is_valid_and_its_imports_from_baton_exist(
    block: CodeBlock,
) -> None:
    tree = ast.parse(block.text)
    imports = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("baton")
    ]

    done = subprocess.run(
        [sys.executable, "-c", "\n".join(imports)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", code_blocks("yaml", "json"), ids=str)
def test_a_data_block_parses(block: CodeBlock) -> None:
    if block.language == "json":
        json.loads(block.text)
    else:
        YAML(typ="safe").load(block.text)


@pytest.mark.parametrize(
    "block", [block for block in code_blocks("yaml") if block.text.startswith("version:")], ids=str
)
def test_a_configuration_that_is_shown_is_a_valid_one(block: CodeBlock, tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(block.text)

    load_config([tmp_path / "shown.yaml"], env={}, sets=[])


def test_every_make_target_that_is_named_exists() -> None:
    code = [found for text in documents().values() for found in _CODE.findall(text)]
    named = {target for found in code for target in _MAKE.findall(found)}

    assert named
    assert named <= targets()


@pytest.mark.parametrize("name", documents())
def test_every_link_within_the_project_resolves(name: str) -> None:
    for link in _LINK.findall(without_code(documents()[name])):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name

        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.resolve()), link


def test_a_picture_is_drawn_with_its_own_ground_and_says_what_it_shows() -> None:
    drawn = sorted((ROOT / "docs/images").glob("*.svg"))

    assert drawn
    for file in drawn:
        root = ElementTree.parse(file).getroot()  # noqa: S314 - the project's own
        title, ground = root[0], root[1]
        assert title.tag.endswith("}title")
        assert len(title.text or "") > len("a picture"), file.name
        assert ground.get("width") == root.get("width"), "pages may be dark"


def test_a_decision_says_what_would_reverse_it_within_sixty_lines() -> None:
    decisions = {
        name: text for name, text in documents().items() if name.startswith("docs/decisions/0")
    }

    assert len(decisions) >= 4
    for name, text in decisions.items():
        wanted = {"context", "decision", "alternatives", "consequences", "what-would-reverse-it"}
        assert wanted <= anchors(ROOT / name), name
        assert len(text.splitlines()) <= 60, name
