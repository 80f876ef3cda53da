"""`baton join`: what another machine is to run."""

from __future__ import annotations

import json

import pytest
from typer.testing import Result

from tests.cli.invoked import invoke
from tests.cli.test_cli import ScriptedCommands

TOLD = {"environment": {"A": "1"}, "command": ["ray", "start"], "script": "export A=1\nray start"}


def run(commands: ScriptedCommands, *arguments: str) -> Result:
    return invoke(commands, "join", *arguments)


def test_it_prints_the_script_and_nothing_else_so_that_a_shell_can_read_it() -> None:
    commands = ScriptedCommands(TOLD)
    result = run(
        commands, "--label", "baton/node=a", "--label", "rack=7", "--node-address", "10.0.0.2"
    )
    assert (result.exit_code, result.stdout) == (0, "export A=1\nray start\n")
    asked = {"labels": ["baton/node=a", "rack=7"], "node_address": "10.0.0.2"}
    assert commands.asked == [("join_script", asked)]


def test_programs_get_its_parts() -> None:
    result = run(ScriptedCommands(TOLD), "--json")
    assert json.loads(result.stdout) == TOLD


@pytest.mark.parametrize("label", ["prefill", "=prefill", "baton/node=", "a=b,c=d"])
def test_a_label_that_is_none_is_refused(label: str) -> None:
    commands = ScriptedCommands(TOLD)
    result = run(commands, "--label", label)
    assert result.exit_code == 2
    assert "expected KEY=VALUE" in result.stderr
    assert not commands.asked
