"""The wheel and the sdist hold what is needed: each verb runs from them in an empty folder."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.main import VERBS
from tests.fakes.free_ports import free_port
from tests.fakes.processes import start_process, stop_process, wait_output
from tests.repo.packages import Installed, build, install, unpack
from tests.repo.project import ROOT, files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_SDIST = {
    *("benchmarks", "configs", "dashboards", "docs", "platform", "requirements"),
    *(".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md"),
    "pyproject.toml",
}
_DOCKER = ROOT / "platform/baton/manifests/templates/docker"
_NEEDS_ENGINES = r"pip install 'baton-llm\[cpu\]' --extra-index-url https://\S+/cpu or pip install"
_NOTHING_RUNS = r"no deployment of this user runs"
_HELP_OF_ALL = """
from typer.testing import CliRunner
from baton.cli.main import VERBS, build_app

for verbs in VERBS.values():
    for name, verb in verbs.items():
        for words in [()] if isinstance(verb.entry_point, str) else verb.entry_point:
            command = [name, *([words] if words else [])]
            shown = CliRunner().invoke(build_app(), [*command, "-h"], catch_exceptions=False)
            assert shown.exit_code == 0, (command, shown.output)
            print(*command)
"""

_WITHOUT_ENGINES = {
    "--version": r"^baton \d",
    "version": r"torch: not installed",
    "completion bash": r"complete .* baton",
    "init tiny --write tiny.yaml": r"written: tiny.yaml",
    "init meta-llama/Llama-3.1-8B --gpu H100 --write gpu.yaml": r"written: gpu.yaml",
    "config validate -c tiny.yaml": r"ok: yes",
    "config show -c gpu.yaml": r"kind: vllm",
    "config schema": r"json-schema.org",
    "keys create --tenant a --file keys.yaml": r"^bt_",
    "keys list --file keys.yaml": r"active",
    "dashboards export dashboards": r"goodput.json",
    "rules export rules": r"baton-slo.yaml",
    "manifests export --target compose -c gpu.yaml --out compose": r"goodput.json",
    "manifests export --target docker -c gpu.yaml --out docker": r"Dockerfile.cuda",
    "manifests export --target helm -c gpu.yaml --out helm": r"Chart.yaml",
    "manifests export --target systemd -c gpu.yaml --out systemd": r"baton-head.service",
    "size meta-llama/Llama-3.1-8B --gpu H100": r"KV cache",
    "simulate -c sim.yaml --workload conv --rate 1 --duration 5s": r"TTFT p50",
}
"""Commands that end well without an engine, and what each prints."""

_UP = "up tiny --write made.yaml --detach --timeout 9s"
_FAILING = {
    "demo --once": _NEEDS_ENGINES,
    _UP: _NEEDS_ENGINES,
    "doctor -c tiny.yaml": r"pip install",
    **dict.fromkeys(("status", "chat hello", "join", "apply -c tiny.yaml"), _NOTHING_RUNS),
    "bench http://127.0.0.1:9 --rate 1 --duration 1s": r"connection refused",
}
"""Commands that need engines or a deployment, and what each says without."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel of this tree."""
    sdist, wheel = sorted(
        build(ROOT, tmp_path_factory.mktemp("built"), "sdist", "wheel"),
        key=lambda path: path.suffix == ".whl",
    )
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel_of_sdist(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = unpack(built[0], tmp_path_factory.mktemp("unpacked"))
    (wheel,) = build(tree, tmp_path_factory.mktemp("rebuilt"), "wheel")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_sdist_holds_files_of_the_project_and_no_other(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    tree = unpack(built[0], tmp_path)
    held = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    ours = {path.relative_to(ROOT).as_posix() for path in files()}

    assert {path.name for path in tree.iterdir()} == _SDIST
    assert held - ours == {"PKG-INFO"}
    assert {name for name in held if name.startswith("benchmarks/")} == {
        name for name in ours if name.startswith("benchmarks/policies/")
    }


def test_the_sdist_makes_the_same_wheel_as_the_tree(
    built: tuple[Path, Path], wheel_of_sdist: Path
) -> None:
    assert contents(wheel_of_sdist) == contents(built[1])


def test_the_context_of_an_image_makes_the_same_wheel_as_the_tree(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    allowed = re.findall(r"^!(\S+)$", (_DOCKER / "dockerignore").read_text(), re.MULTILINE)
    dockerfiles = [(_DOCKER / name).read_text() for name in ("Dockerfile.cpu", "Dockerfile.cuda")]
    cpu, cuda = (
        re.findall(r"^COPY (?!--|requirements)(.*) \S+$", text, re.MULTILINE)
        for text in dockerfiles
    )
    assert cpu == cuda
    context = tmp_path / "context"
    context.mkdir()
    for name in " ".join(cpu).split():
        assert name in allowed
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name)
        else:
            shutil.copy(ROOT / name, context)

    (wheel,) = build(context, tmp_path / "wheel", "wheel")
    assert contents(wheel) == contents(built[1])


# ----------------------------------------------------------------------------- without engines


@pytest.fixture(scope="module")
def plain(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel with what it asks for itself."""
    installed = install(built[1], tmp_path_factory.mktemp("plain"), with_engines=False)
    shutil.copy(ROOT / "configs/sim.yaml", installed.folder)
    return installed


def check_output(command: str, done: subprocess.CompletedProcess[str], pattern: str) -> None:
    """What a command printed is as expected, and names nothing of this tree."""
    output = done.stdout + done.stderr
    assert re.search(pattern, output, re.MULTILINE), f"{command}: {output}"
    assert "Traceback" not in output, f"{command}: {output}"
    assert f"{ROOT}/platform" not in output, f"{command}: {output}"


def test_verbs_that_need_no_engine_run_from_the_wheel_alone(plain: Installed) -> None:
    for command, pattern in _WITHOUT_ENGINES.items():
        done = plain.run(*shlex.split(command))
        check_output(command, done, pattern)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_every_verb_shows_its_help_from_the_wheel_alone(plain: Installed) -> None:
    python = str(plain.program.with_name("python"))
    done = subprocess.run(
        [python, "-c", _HELP_OF_ALL],
        cwd=plain.folder,
        env=plain.environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = {line.split()[0] for line in done.stdout.splitlines()}
    assert shown == {name for verbs in VERBS.values() for name in verbs}


def test_verbs_that_need_an_engine_say_how_to_install_one(plain: Installed) -> None:
    plain.run("init", "tiny", "--write", "tiny.yaml")
    for command, pattern in _FAILING.items():
        done = plain.run(*shlex.split(command))
        check_output(command, done, pattern)
        assert done.returncode in {1, 3}, f"{command}: {done.stderr}"
    made = plain.run("config", "validate", "-c", "made.yaml")
    assert made.returncode == 0, made.stderr


# -------------------------------------------------------------------------------- with engines


@pytest.fixture(scope="module")
def with_engines(wheel_of_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The sdist's wheel, beside an engine."""
    return install(wheel_of_sdist, tmp_path_factory.mktemp("engines"), with_engines=True)


@pytest.fixture
def demo(
    with_engines: Installed, tmp_path: Path
) -> Iterator[tuple[Installed, subprocess.Popen[bytes], Path]]:
    """A demo that stays up, of simulated engines; and its output."""
    installed, folder = with_engines, tmp_path
    shutil.copy(ROOT / "configs/sim.yaml", installed.folder)
    sets = (
        *(f"server.port={free_port()}", "observability.metrics.port=0"),
        *("pools.prefill.replicas.initial=1", "pools.decode.replicas.initial=1"),
    )
    options = [word for set_ in sets for word in ("--set", set_)]
    command = (str(installed.program), "demo", "-c", "sim.yaml", *options)
    log = folder / "demo.log"
    process = start_process(command, log, installed.environment, folder=installed.folder)
    try:
        wait_output("stays up at", process, log, timeout_s=240)
        yield installed, process, log
    finally:
        survivors = stop_process(process)
    assert not survivors


_BESIDE_A_DEPLOYMENT = {
    "status": r"^model: tiny$",
    "trace": r"demo-\d",
    "chat --max-tokens 4 --verbose Hello": r"4 tokens, ended by length, prefill-\w+ -> decode-",
    "explain scale": r"decode",
    "logs": r"replica_started",
    "apply -c sim.yaml --diff": r"server.port: \d+ -> 8000",
    "down": r"stopped: http",
}
"""Commands for a deployment, and what each prints. The last one ends it."""


def test_a_demo_starts_from_the_wheel_and_verbs_find_it(
    demo: tuple[Installed, subprocess.Popen[bytes], Path],
) -> None:
    installed, process, log = demo
    for command, pattern in _BESIDE_A_DEPLOYMENT.items():
        done = installed.run(*shlex.split(command), timeout_s=120)
        check_output(command, done, pattern)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    assert process.wait(60) == 0
    figures = next(line for line in log.read_text().splitlines() if line.startswith("{"))
    assert json.loads(figures)["ok"] == json.loads(figures)["requests"] > 0


_BESIDE_A_MODEL = {
    "config validate -c made.yaml": r"ok: yes",
    "status": r"decode-\w+ +decode .* ready +vllm",
    "chat --max-tokens 4 --verbose Hello": r"4 tokens, ended by length, \S*decode-",
    "trace": r"chat-\w+",
    "down": r"stopped: http",
}
"""As `_BESIDE_A_DEPLOYMENT`, for real engines."""


@pytest.mark.long
def test_a_model_is_served_from_the_wheel_by_one_line_without_a_file(
    with_engines: Installed,
) -> None:
    sets = ("--set", f"server.port={free_port()}", "--set", "observability.metrics.port=0")
    up = ("up", "tiny", "--write", "made.yaml", *sets, "--detach", "--timeout", "240s")
    done = with_engines.run(*up, timeout_s=300)
    assert done.returncode == 0, done.stderr
    for command, pattern in _BESIDE_A_MODEL.items():
        done = with_engines.run(*shlex.split(command), timeout_s=120)
        check_output(command, done, pattern)
        assert done.returncode == 0, f"{command}: {done.stderr}"
