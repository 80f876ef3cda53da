"""The command line: what is asked of serving, what is printed where, and how it exits."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner, Result

import baton
from baton.cli.backend import Backend, Commands, Progress, Report
from baton.cli.main import build_app
from baton.cli.output import (
    Styled,
    TextStyle,
    attainment_style,
    bytes_text,
    duration_text,
    styled,
    table_lines,
    text_lines,
)
from baton.config import DeploymentConfig, LoadedConfig, load_config
from baton.config.diff import diff
from baton.domain.errors import (
    BatonError,
    DeadlineExceeded,
    EngineStartFailed,
    LinkFailed,
    NotRunning,
    TimedOut,
    UnknownRequest,
)
from baton.serving.rollout.ports import ApplyOptions
from baton.telemetry.requests.request_log import request_report
from tests.cli.test_explain_readable import RECORD

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SIM = str(ROOT / "configs" / "sim.yaml")
BATON = (sys.executable, "-m", "baton.cli.main")


@dataclass
class ScriptedCommands:
    """Answers every verb with one report or one error, and remembers what it was asked."""

    answer: Report | Exception = field(default_factory=dict)
    asked: list[tuple[str, dict[str, object]]] = field(default_factory=list)

    def _answer(self, verb: str, **asked: object) -> Report:
        self.asked.append((verb, asked))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def up(
        self, config: LoadedConfig, *, block: bool, timeout_s: float, progress: Progress
    ) -> Report:
        progress("starting engines")
        return self._answer("up", config=config, block=block, timeout_s=timeout_s)

    def status(self, *, address: str | None) -> Report:
        return self._answer("status", address=address)

    def explain_route(self, request_id: str, *, address: str | None) -> Report:
        return self._answer("explain_route", request_id=request_id, address=address)

    def links(self, *, address: str | None) -> Report:
        return self._answer("links", address=address)

    def scale(
        self, pool: str, replicas: int, *, for_s: float | None, address: str | None
    ) -> Report:
        return self._answer("scale", pool=pool, replicas=replicas, for_s=for_s, address=address)

    def scale_auto(self, pool: str, *, address: str | None) -> Report:
        return self._answer("scale_auto", pool=pool, address=address)

    def explain_scale(self, ticks: int, *, address: str | None) -> Report:
        return self._answer("explain_scale", ticks=ticks, address=address)

    def usage(self, *, address: str | None) -> Report:
        return self._answer("usage", address=address)

    def running_config(self, *, address: str | None) -> tuple[int, DeploymentConfig]:
        self.asked.append(("running_config", {"address": address}))
        return 7, load_config([Path(SIM)]).config

    def apply(self, config: LoadedConfig, options: ApplyOptions, *, progress: Progress) -> Report:
        progress("asking")
        return self._answer("apply", config=config, options=options)

    def join_script(
        self, *, labels: Sequence[str], node_address: str | None, address: str | None
    ) -> Report:
        return self._answer("join_script", labels=labels, node_address=node_address)

    def down(self, *, timeout_s: float, address: str | None = None) -> Report:
        return self._answer("down", timeout_s=timeout_s)

    def demo(self, config: LoadedConfig, *, once: bool, progress: Progress) -> Report:
        progress("asking")
        return self._answer("demo", config=config, once=once)


Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Runs the command line in this process, in front of scripted commands."""

    def _run(
        *arguments: str,
        commands: ScriptedCommands | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Result:
        scripted = cast(Commands, commands or ScriptedCommands())
        seam = Backend(commands=lambda: scripted, environ=environ or {})
        return CliRunner().invoke(build_app(), arguments, obj=seam)

    return _run


# ---------------------------------------------------------------------------------- the verbs


def test_up_hands_over_the_configuration_with_all_its_layers(run: Run) -> None:
    commands = ScriptedCommands({"healthy": True})
    result = run(
        *("up", "-c", QUICKSTART, "--set", "server.port=9001", "--timeout", "90s", "--detach"),
        commands=commands,
        environ={"BATON__ADMISSION__MAX_QUEUED_REQUESTS": "7"},
    )
    assert result.exit_code == 0
    ((verb, asked),) = commands.asked
    loaded = asked.pop("config")
    assert isinstance(loaded, LoadedConfig)
    assert (loaded.config.server.port, loaded.config.admission.max_queued_requests) == (9001, 7)
    assert (verb, asked) == ("up", {"block": False, "timeout_s": 90.0})


def test_up_stays_unless_told_to_detach(run: Run) -> None:
    commands = ScriptedCommands()
    run("up", "-c", QUICKSTART, commands=commands)
    assert commands.asked[0][1]["block"] is True


def test_nothing_is_started_with_a_wrong_configuration(run: Run) -> None:
    commands = ScriptedCommands()
    result = run("up", "-c", QUICKSTART, "--set", "server.prot=1", commands=commands)
    assert result.exit_code == 2
    assert commands.asked == []
    assert "server.prot: unknown key, did you mean 'port'?" in result.stderr
    assert result.stdout == ""


def test_explain_and_links_pass_their_options_on(run: Run) -> None:
    commands = ScriptedCommands({"requests": [], "links": []})
    for arguments in (
        ("explain", "route", "r-1", "--address", "h:1"),
        ("explain", "route", "r-1"),
        ("links", "--address", "h:1"),
        ("links",),
    ):
        assert run(*arguments, commands=commands).exit_code == 0
    assert commands.asked == [
        ("explain_route", {"request_id": "r-1", "address": "h:1"}),
        ("explain_route", {"request_id": "r-1", "address": None}),
        ("links", {"address": "h:1"}),
        ("links", {"address": None}),
    ]


@pytest.mark.parametrize("as_json", [("--json",), ("-o", "json"), ("--output", "json")])
@pytest.mark.parametrize("verb", [("status",), ("links",), ("explain", "route", "r")], ids=" ".join)
def test_json_is_the_whole_report_as_one_object(
    run: Run, verb: tuple[str, ...], as_json: tuple[str, ...]
) -> None:
    report = {"requests": [{"a": 1}], "links": [{"b": 2.5}], "members": [{"c": None}]}
    result = run(*verb, *as_json, commands=ScriptedCommands(report))
    (line,) = result.stdout.splitlines()
    assert json.loads(line) == report


def test_people_get_tables_and_not_json(run: Run) -> None:
    report = {"requests": [request_report(RECORD)]}
    explained = run("explain", "route", "r", commands=ScriptedCommands(report))
    assert explained.stdout.splitlines()[0] == f"{RECORD.request_id}: finished (stop)"
    shown = run("links", commands=ScriptedCommands({"links": []}))
    assert shown.stdout.splitlines()[0] == "pairs: none: nothing hands blocks over here"


def test_an_unknown_request_id_is_one_clear_line(run: Run) -> None:
    error = UnknownRequest("no request 'r-1' among those that ended recently", "ask again later")
    result = run("explain", "route", "r-1", "--json", commands=ScriptedCommands(error))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error: no request 'r-1' among those that ended recently\nnext: ask again later\n"
    )


def test_status_and_down_pass_their_options_on(run: Run) -> None:
    commands = ScriptedCommands()
    run("status", "--address", "h:1", commands=commands)
    run("status", commands=commands)
    run("down", "--timeout", "2m", commands=commands)
    assert commands.asked == [
        ("status", {"address": "h:1"}),
        ("status", {"address": None}),
        ("down", {"timeout_s": 120.0}),
    ]


def test_the_last_line_of_a_demo_is_its_figures_as_json(run: Run) -> None:
    figures = {"requests": 4, "ok": 4, "bytes_moved": 8192, "ttft_p50_s": 0.25}
    result = run("demo", "--once", "-c", QUICKSTART, commands=ScriptedCommands(figures))
    assert json.loads(result.stdout.splitlines()[-1]) == figures
    assert "asking" in result.stderr


def test_a_demo_finds_the_quickstart_from_any_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = ScriptedCommands()
    assert run("demo", commands=commands).exit_code == 0
    assert commands.asked[0][1]["once"] is False


# ------------------------------------------------------------------------------ data and progress


def test_data_goes_to_stdout_and_progress_to_stderr(run: Run) -> None:
    result = run("up", "-c", QUICKSTART, "-o", "json", commands=ScriptedCommands({"a": 1}))
    assert json.loads(result.stdout) == {"a": 1}
    assert "starting engines" in result.stderr


def test_text_shows_reports_as_lines_and_lists_of_reports_as_tables() -> None:
    report: dict[str, object] = {
        "healthy": True,
        "model": None,
        "pools": {"decode": {"replicas": 2, "load": 0.123456789}},
        "replicas": [{"id": "a", "running": 1}, {"id": "bcd", "running": 22, "why": "x"}],
        "files": ["a", "b"],
        "none": [],
    }
    assert list(text_lines(report)) == [
        "healthy: yes",
        "model: -",
        "pools:",
        "  decode:",
        "    replicas: 2",
        "    load: 0.123457",
        "replicas:",
        "  id   running  why",
        "  a    1        -",
        "  bcd  22       x",
        "files: a, b",
        "none: -",
    ]


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.0000123, "0.0123 ms"),
        (0.2314, "231 ms"),
        (0.9994, "999 ms"),
        (0.99951, "1 s"),
        (1.2351, "1.24 s"),
        (99.96, "100 s"),
        (120.0, "2 min"),
        (1800.0, "30 min"),
        (1234.0, "20 min 34 s"),
        (7500.0, "2 h 5 min"),
        (3605.0, "1 h"),
        (3 * 86_400 + 4 * 3600 + 59.0, "3 d 4 h"),
        (math.inf, "never"),
        (-0.25, "-250 ms"),
        (-600.0, "-10 min"),
    ],
)
def test_a_duration_is_said_in_three_digits_with_its_unit(
    duration_s: float | None, text: str
) -> None:
    assert duration_text(duration_s) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (2.5e9, "2.5 GB"),
        (7e12, "7 TB"),
        (5e15, "5000 TB"),
    ],
)
def test_bytes_are_said_in_three_digits_with_their_unit(size_bytes: float, text: str) -> None:
    assert bytes_text(size_bytes) == text


def test_a_cell_of_a_table_is_always_one_line() -> None:
    rows = [{"status": "reverted", "why": "two\n  lines\x1b[2J"}, {"status": "applied", "why": "-"}]
    assert list(text_lines({"generations": rows})) == [
        "generations:",
        "  status    why",
        "  reverted  two lines [2J",
        "  applied   -",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_gets_colours_unless_it_wants_none(
    environ: dict[str, str], *, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert ("\x1b" in styled("FAIL", TextStyle.BAD)) is coloured
    assert "\x1b" not in styled("FAIL", TextStyle.BAD, err=True)


# ------------------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineStartFailed("no memory", "free some"), 1),
        (BatonError("odd"), 1),
        (PermissionError("not yours"), 1),
        (NotRunning("nothing runs here", "start it"), 3),
        (LinkFailed("d-1", "gone"), 3),
        (ConnectionRefusedError("refused"), 3),
        (UnknownRequest("no request 'r-1'", "wait until it has ended"), 1),
        (TimedOut("not healthy after 90 s", "wait longer"), 4),
        (DeadlineExceeded("r-1", "too slow"), 4),
        (TimeoutError("too slow"), 4),
    ],
)
def test_an_error_has_an_exit_code_of_its_kind_and_ends_with_a_next_step(
    run: Run, error: Exception, code: int
) -> None:
    result = run("status", commands=ScriptedCommands(error))
    assert result.exit_code == code
    assert result.stdout == ""
    *lines, last = result.stderr.splitlines()
    assert lines
    assert all(line.startswith("error: ") for line in lines)
    assert last.startswith("next: ")


def test_a_mistake_of_ours_is_not_dressed_up_as_an_error_of_the_user(run: Run) -> None:
    result = run("status", commands=ScriptedCommands(KeyError("bug")))
    assert isinstance(result.exception, KeyError)


@pytest.mark.parametrize(
    "arguments",
    [
        ("up",),
        ("up", "--config"),
        ("up", "-c", QUICKSTART, "--timeout", "90"),
        ("down", "--timeout", "0s"),
        ("status", "-o", "yaml"),
        ("start",),
        ("explain",),
        ("explain", "route"),
        ("explain", "r-1"),
        ("links", "r-1"),
        ("config", "validate", QUICKSTART),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    commands = ScriptedCommands()
    result = run(*arguments, commands=commands)
    assert result.exit_code == 2
    assert commands.asked == []


# ------------------------------------------------------------------------------------------ config


def test_validate_says_what_it_found(run: Run) -> None:
    result = run("config", "validate", "-c", QUICKSTART, "-o", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "ok": True,
        "files": [QUICKSTART],
        "models": ["tiny"],
        "pools": ["prefill", "decode"],
        "replicas": 2,
    }


def test_validate_warns_of_keys_that_work_against_each_other(run: Run) -> None:
    zero = [
        "--set",
        "pools.decode.replicas={min: 0, initial: 1}",
        "--set",
        "autoscaler.dry_run=true",
    ]
    zero += ["--set", "autoscaler.scale_to_zero=true"]
    result = run("config", "validate", "-c", QUICKSTART, *zero, "-o", "json")
    assert result.exit_code == 0
    (warning,) = json.loads(result.stdout)["warnings"]
    assert warning.startswith("autoscaler.scale_to_zero: no effect with autoscaler.dry_run")


def test_validate_says_that_it_does_not_ask_for_the_labels_of_nodes(run: Run) -> None:
    result = run("config", "validate", "-c", "configs/three-nodes.yaml", "-o", "json")
    assert json.loads(result.stdout)["not_checked"].startswith(
        "whether nodes have the labels of pools prefill, decode:"
    )
    result = run("config", "validate", "-c", QUICKSTART, "-o", "json")
    assert "not_checked" not in json.loads(result.stdout)


def test_validate_lists_everything_that_is_wrong(run: Run) -> None:
    wrong = ("config", "validate", "-c", QUICKSTART, "--set", "a=1", "--set", "b=1")
    result = run(*wrong)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["error", "error", "next"]
    as_json = run(*wrong, "-o", "json")
    assert as_json.exit_code == 2
    report = json.loads(as_json.stdout)
    assert report["ok"] is False
    assert len(report["findings"]) == 2


def test_show_prints_a_configuration_that_validates(run: Run, tmp_path: Path) -> None:
    shown = run("config", "show", "-c", QUICKSTART, "--set", "server.port=9001")
    file = tmp_path / "shown.yaml"
    file.write_text(shown.stdout)
    again = run("config", "show", "-c", str(file))
    assert again.exit_code == 0
    assert again.stdout == shown.stdout
    assert "port: 9001" in shown.stdout


def test_show_tells_where_each_value_came_from(run: Run) -> None:
    arguments = ("config", "show", "-c", QUICKSTART, "--origins", "--set", "server.port=9001")
    environ = {"BATON__ADMISSION__MAX_QUEUED_REQUESTS": "7"}
    lines = run(*arguments, environ=environ).stdout.splitlines()
    assert "server.port: 9001  # --set" in lines
    assert "admission.max_queued_requests: 7  # env BATON__ADMISSION__MAX_QUEUED_REQUESTS" in lines
    assert "models.tiny.engine.kind: vllm  # default" in lines
    assert f"version: 1  # {QUICKSTART}:2:10" in lines
    report = json.loads(run(*arguments, "-o", "json", environ=environ).stdout)
    assert report["config"]["server"]["port"] == 9001
    assert report["origins"]["server.port"] == "--set"


def test_schema_prints_a_json_schema(run: Run) -> None:
    assert json.loads(run("config", "schema").stdout)["title"] == "baton"


def test_version_needs_nothing_installed_but_baton(run: Run) -> None:
    assert run("version").stdout.startswith(f"baton {baton.__version__}\n")
    report = json.loads(run("version", "-o", "json").stdout)
    assert report["baton"] == baton.__version__
    assert {"python", "ray", "vllm", "nixl", "torch"} <= set(report)


# --------------------------------------------------------------------------------- a real process


def baton_process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BATON, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environ,
        cwd=ROOT,
    )


def imported_by(code: str) -> set[str]:
    """Top-level packages that are imported after running `code` in a new process."""
    code += "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    return set(done.stdout.split())


HEAVY = {"ray", "torch", "vllm", "nixl", "nixl_cu12", "transformers", "pydantic", "fastapi"}


def test_the_command_line_imports_nothing_heavy() -> None:
    found = imported_by("import baton.cli.main")
    assert "typer" in found
    assert not found & (HEAVY | {"zmq", "asyncio", "ruamel", "msgspec", "rich"})


def test_a_configuration_is_simulated_where_no_vendor_is_installed() -> None:
    arguments = ["simulate", "-c", SIM, "--workload", "conv", "--rate", "4", "--requests", "3"]
    found = imported_by(
        "from contextlib import redirect_stdout; from io import StringIO\n"
        "from baton.cli.main import build_app\n"
        "with redirect_stdout(StringIO()):\n"
        f"    build_app()({arguments!r}, standalone_mode=False)\n"
        "pass"
    )
    # typer converts options with pydantic.
    assert not found & (HEAVY - {"pydantic"} | {"matplotlib", "numpy", "pyarrow"})


def test_configurations_are_checked_where_no_vendor_is_installed() -> None:
    found = imported_by(f"from baton.config import load_config; load_config([{QUICKSTART!r}])")
    assert not found & HEAVY


def test_a_process_exits_with_the_code_of_its_error() -> None:
    assert baton_process("--help").returncode == 0
    assert baton_process("config", "validate", "-c", "configs/sim.yaml").returncode == 0
    wrong = baton_process("config", "validate", "-c", "none.yaml")
    assert wrong.returncode == 2
    assert "none.yaml:1:1: cannot be read: no such file or directory" in wrong.stderr
    assert wrong.stdout == ""


READ_A_LITTLE = """
import sys
from baton.cli.main import build_app
from baton.cli.backend import Backend

class Commands:
    def status(self, address):
        return {"endpoint": "x" * 200_000}

build_app()(sys.argv[1:], obj=Backend(commands=Commands, environ={}))
"""


def test_a_reader_that_has_enough_ends_a_verb_without_a_word() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", READ_A_LITTLE, "status"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, b"")


def test_a_connection_that_breaks_is_still_an_error(run: Run) -> None:
    result = run("status", commands=ScriptedCommands(BrokenPipeError(32, "Broken pipe")))
    assert result.exit_code == 3
    assert "Broken pipe" in result.stderr


@pytest.mark.parametrize("interval", ["200000d", "9" * 400 + "s"])
def test_a_duration_beyond_all_timers_is_a_usage_error(run: Run, interval: str) -> None:
    result = run("status", "--watch", "--interval", interval)
    assert result.exit_code == 2
    assert "expected at most 100 years" in result.stderr


def test_environment_variables_of_the_process_are_a_layer() -> None:
    done = baton_process("config", "validate", "-c", QUICKSTART, BATON__SERVER__PORT="x")
    assert done.returncode == 2
    assert "env BATON__SERVER__PORT: server.port: got 'x'" in done.stderr


def test_nothing_is_coloured_where_colour_is_not_wanted() -> None:
    done = baton_process("config", "validate", "-c", "none.yaml", NO_COLOR="1")
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("share", "target", "style"),
    [
        (0.99, 0.99, TextStyle.GOOD),
        (0.981, 0.99, TextStyle.WARNING),
        (0.979, 0.99, TextStyle.BAD),
        (0.81, 0.9, TextStyle.WARNING),
        (0.79, 0.9, TextStyle.BAD),
        (0.41, 0.5, TextStyle.WARNING),
        (0.39, 0.5, TextStyle.BAD),
        (0.995, 1.0, TextStyle.WARNING),
        (None, 0.9, None),
        (0.5, None, None),
    ],
)
def test_an_attainment_is_green_at_its_target_yellow_just_below_and_red_far_below(
    share: float | None, target: float | None, style: TextStyle | None
) -> None:
    assert attainment_style(share, target) is style


def test_a_cell_in_colour_is_as_wide_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"now": Styled("99%", TextStyle.BAD), "then": "x"}]
    plain = list(table_lines(rows))
    assert "\x1b" not in "".join(plain), "stdout is no terminal"
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    coloured = list(table_lines(rows))
    assert "\x1b[31m" in coloured[1]
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in coloured] == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert list(table_lines(rows)) == plain


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name
)
def test_the_output_of_config_show_is_applied_unchanged(
    file: Path, run: Run, tmp_path: Path
) -> None:
    shown, again = run("config", "show", "-c", str(file)), tmp_path / "again.yaml"
    again.write_text(shown.stdout)
    commands = ScriptedCommands({"generation": 1, "changes": [], "outcome": "applied"})
    applied = run("apply", "-c", str(again), commands=commands)
    assert (applied.exit_code, applied.stderr) == (0, run("apply", "-c", str(file)).stderr)
    loaded = cast("LoadedConfig", commands.asked[0][1]["config"])
    assert not diff(load_config([file]).config, loaded.config)


def test_the_running_configuration_is_shown_and_is_what_apply_takes(
    run: Run, tmp_path: Path
) -> None:
    shown = run("config", "show", "--running", "--address", "h:1")
    assert (shown.exit_code, shown.stderr) == (0, "generation 7 runs\n")
    again = tmp_path / "again.yaml"
    again.write_text(shown.stdout)
    assert load_config([again]).config == load_config([Path(SIM)]).config


@pytest.mark.parametrize(
    "words",
    [(), ("--running", "-c", SIM), ("--running", "--origins"), ("--running", "--set", "version=1")],
)
def test_either_a_file_or_the_running_configuration_is_shown(
    words: tuple[str, ...], run: Run
) -> None:
    refused = run("config", "show", *words)
    assert refused.exit_code == 2, refused.output
