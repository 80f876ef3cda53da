"""How baton is installed: the one place that says so."""

from __future__ import annotations

DISTRIBUTION = "baton-llm"
"""Its name on package indexes, where `baton` is another project's. The command and the import are
`baton`."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The index with torch's builds for CPUs, which the extra `cpu` needs; PyPI has none."""


def with_extra(extra: str) -> str:
    """The requirement of baton with one extra, quoted for a shell: `'baton-llm[cpu]'`."""
    return f"'{DISTRIBUTION}[{extra}]'"


def pip_install(extra: str, *options: str) -> str:
    """The command that installs baton with one extra: `pip install 'baton-llm[report]'`."""
    index = ("--extra-index-url", TORCH_CPU_INDEX) if extra == "cpu" else ()
    return " ".join(("pip install", *options, with_extra(extra), *index))


def pip_install_engine(*options: str) -> str:
    """The commands of which one installs baton with an engine."""
    return f"{pip_install('cpu', *options)} or {pip_install('gpu', *options)}"
