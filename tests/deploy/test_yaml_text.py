"""Plain values as YAML: every reader gets back what was written."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from baton.manifests.yaml_writer import yaml_text

ODD = (
    "  {% for m in messages %}\n{{ m }}\n{% endfor %}",
    "\n{{ x }}\n",
    "\n",
    "a\n\n",
    "a\n  \nb",
    "a\n  ",
    "\ta\nb",
    "a\r\nb",
    "a\x0cb\nc",
    "a\x7f\x85\u2028\ufeffb",
    "\U0001f600\U000e0001",
    "0xff",
    "0XAB",
    "0b",
    "Yes",
    "1e3",
)
LINES = st.text(st.sampled_from(["a", " ", "\n", "\t", "#", ":", "-", "\r", "\x85"]), max_size=12)


def read(text: str) -> list[object]:
    """What readers of YAML 1.1 and 1.2 make of it."""
    return [yaml.safe_load(text), YAML(typ="safe", pure=True).load(text)]


@pytest.mark.parametrize("text", ODD)
def test_an_odd_text_is_read_as_it_was_written(text: str) -> None:
    value = {"args": [{"template": text}, text]}
    assert read(yaml_text(value)) == [value, value]


@given(text=LINES)
def test_any_text_is_read_as_it_was_written(text: str) -> None:
    value = {"args": [{"template": text}, text]}
    assert read(yaml_text(value)) == [value, value]


@pytest.mark.parametrize("text", ["a\nb", "a\n\n  b\n", "if:\n\tb  \n"])
def test_a_long_text_that_survives_it_is_a_block(text: str) -> None:
    written = yaml_text({"key": text})
    assert written.startswith("key: |")
    assert read(written) == [{"key": text}] * 2


@pytest.mark.parametrize("text", ["0xff", "0XFF", "0xffff"])
def test_what_reads_as_a_number_elsewhere_is_quoted(text: str) -> None:
    assert yaml_text({"key": text}) == f'key: "{text}"\n'
