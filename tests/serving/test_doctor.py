"""`baton doctor`: what each check says of what is broken, and that it passes what is good."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from baton.config.schema.deployment import DeploymentConfig
from baton.domain.names.distribution import pip_install
from baton.serving.checks.configuration import doctor_checks
from baton.serving.checks.facts import (
    INGRESS_IMPORT,
    Coupling,
    DiskFact,
    FileDescriptorLimits,
    FileFact,
    ImportResult,
    MachineSnapshot,
    PendingFact,
    PortFact,
    file_fact,
    gather_disks,
    gather_fact,
    health_problem,
    http_problem,
    port_facts,
    rdma_nics,
    secret_files,
)
from baton.serving.checks.machine import machine_checks
from baton.serving.checks.named_files import key_findings, source_findings, tls_findings
from baton.serving.checks.result import Check, CheckStatus, Finding, Topic, UnknownFact
from baton.serving.doctor import build_report
from tests.serving.configs import SMALL, written

GIB = 1024**3
IMPORTS = {
    "torch": ImportResult(version="2.13.0+cpu"),
    "ray": ImportResult(version="2.60.0"),
    "vllm": ImportResult(version="0.32.0"),
    "nixl": ImportResult(version="1.5.1"),
    INGRESS_IMPORT: ImportResult(),
}
GOOD = MachineSnapshot(
    python="3.11.2",
    versions={"ray": "2.60.0", "vllm": "0.32.0", "nixl": "1.5.1", "torch": "2.13.0+cpu"},
    conflicting_packages={"torchvision": None, "torchaudio": None, "torchcodec": None},
    imports=IMPORTS,
    gpus=0,
    available_memory_bytes=256 * GIB,
    free_shared_memory_bytes=8 * GIB,
    disks=(DiskFact(purpose="logs", path="/logs", free_bytes=100 * GIB),),
    fd_limits=FileDescriptorLimits(soft=65536, hard=65536),
    haproxy_warning=None,
    clock_synchronized=True,
    ports=(PortFact(key="server.port", host="127.0.0.1", port=8000, free=True),),
)


@pytest.fixture
def config(tmp_path: Path) -> DeploymentConfig:
    return loaded(tmp_path)


def loaded(tmp_path: Path, *sets: str) -> DeploymentConfig:
    return written(tmp_path, SMALL, *sets)


def all_checks(
    machine: MachineSnapshot, config: DeploymentConfig | None, *, runs_at: str | None = None
) -> list[Check]:
    if config is not None:
        machine = with_files(machine, config)
    return [
        *machine_checks(machine, config),
        *doctor_checks(machine, config, running_url=runs_at),
    ]


def with_files(machine: MachineSnapshot, config: DeploymentConfig) -> MachineSnapshot:
    """With the files of this configuration as they are."""
    return replace(
        machine,
        model_findings=source_findings(config.models),
        key_findings=key_findings(config),
        tls_findings=tls_findings(config),
    )


def check(name: str, machine: MachineSnapshot, config: DeploymentConfig | None = None) -> Check:
    (found,) = [other for other in all_checks(machine, config) if other.name == name]
    return found


FITS = Coupling(
    vendor="vLLM",
    name="fast chunks",
    package="vllm",
    problem=None,
    fallback="chunks are slower",
    is_required=False,
)


@pytest.mark.parametrize(
    ("is_required", "status"), [(False, CheckStatus.WARN), (True, CheckStatus.FAIL)]
)
def test_a_coupling_that_does_not_fit_is_named_with_its_fallback(
    is_required: bool,  # noqa: FBT001 - a parameter of the test
    status: CheckStatus,
) -> None:
    unfit = msgspec.structs.replace(
        FITS, name="a limit", problem="no search", is_required=is_required
    )
    found = check("couplings to vLLM", replace(GOOD, couplings=(FITS, unfit)))
    assert found.status is status
    assert found.detail == (
        "1 of 2 couplings to vLLM fit; a limit: got no search, expected the private names of a"
        " tested vllm (otherwise chunks are slower)"
    )
    other = check("couplings to Ray", replace(GOOD, couplings=(FITS, unfit)))
    assert other.detail == "0 of 0 couplings to Ray fit"


def test_couplings_that_could_not_be_tried_are_skipped() -> None:
    found = check("couplings to NIXL", replace(GOOD, couplings=UnknownFact("too slow")))
    assert (found.status, found.detail) == (CheckStatus.SKIP, "too slow")


def test_a_good_machine_passes_every_check(config: DeploymentConfig) -> None:
    assert {other.status for other in all_checks(GOOD, config)} == {CheckStatus.PASS}


CARDS = replace(GOOD, nics=("mlx5_0", "mlx5_1"))
WIDE = ("pools.decode.parallel.tp=2", "pools.decode.resources.gpus=2")


def test_workers_that_share_one_of_several_cards_are_told_of(tmp_path: Path) -> None:
    one = loaded(tmp_path, *WIDE, "transfer.env.UCX_NET_DEVICES=mlx5_0:1")
    found = check("network cards", CARDS, one)
    assert found.status is CheckStatus.WARN
    assert "workers of decode use mlx5_0:1, one of 2 cards here (mlx5_0, mlx5_1)" in found.detail
    assert "VLLM_GPU_NIC_PCIE_MAPPING" in found.fix


@pytest.mark.parametrize(
    ("cards", "value"), [(2, "mlx5_0:1,mlx5_1:1"), (2, "all"), (1, "mlx5_0:1"), (2, None)]
)
def test_workers_that_may_use_every_card_are_not(
    tmp_path: Path, cards: int, value: str | None
) -> None:
    sets = [] if value is None else [f"transfer.env.UCX_NET_DEVICES={value}"]
    machine = replace(CARDS, nics=CARDS.nics[:cards])
    found = check("network cards", machine, loaded(tmp_path, *WIDE, *sets))
    assert found.status is CheckStatus.PASS


def test_half_of_a_mapping_of_cards_is_told_of(tmp_path: Path) -> None:
    half = loaded(tmp_path, "pools.decode.env.VLLM_GPU_NIC_PCIE_MAPPING=01:00.0=02:00.0")
    found = check("network cards", GOOD, half)
    assert found.status is CheckStatus.FAIL
    assert "VLLM_NIC_SELECTION_VARS" in found.detail


def test_cards_are_those_that_the_kernel_lists(tmp_path: Path) -> None:
    assert rdma_nics(tmp_path / "none") == ()
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert rdma_nics(tmp_path) == ("mlx5_0", "mlx5_1")


def test_without_a_configuration_its_checks_are_skipped_and_say_how_to_name_one(
    tmp_path: Path,
) -> None:
    skipped = [other for other in all_checks(GOOD, None) if other.status is CheckStatus.SKIP]
    of_config = [other.name for other in doctor_checks(GOOD, None, running_url=None)]
    assert [other.name for other in skipped] == of_config
    every = list(doctor_checks(GOOD, loaded(tmp_path), running_url=None))
    assert [other.name for other in every] == of_config
    assert {failed_check.detail for failed_check in skipped} == {
        "no configuration was given; name one with -c FILE"
    }


# ------------------------------------------------------------------------------------- versions


def test_a_package_that_cannot_be_imported_says_why() -> None:
    broken = {**IMPORTS, "vllm": ImportResult(problem="ImportError: libnuma.so.1")}
    found = check("imports", replace(GOOD, imports=broken))
    assert found.status is CheckStatus.FAIL
    assert found.detail == "vllm: ImportError: libnuma.so.1"
    assert "vllm" in found.fix


def test_an_ingress_that_this_vllm_does_not_carry_is_found_before_it_starts() -> None:
    broken = {
        **IMPORTS,
        INGRESS_IMPORT: ImportResult(problem="ModuleNotFoundError: vllm.entrypoints.x"),
    }
    found = check("imports", replace(GOOD, imports=broken))
    assert found.status is CheckStatus.FAIL
    assert "the ingress's import" in found.detail
    assert "vllm.entrypoints.x" in found.detail
    both = {**broken, "vllm": ImportResult(problem="ImportError: libnuma.so.1")}
    assert check("imports", replace(GOOD, imports=both)).detail == "vllm: ImportError: libnuma.so.1"


def test_imports_that_never_end_fail() -> None:
    found = check("imports", replace(GOOD, imports=UnknownFact("importing them: nothing came")))
    assert (found.status, found.detail) == (CheckStatus.FAIL, "importing them: nothing came")
    assert check("build", replace(GOOD, imports=UnknownFact("x"))).status is CheckStatus.SKIP


def test_a_build_for_cpus_beside_gpus_is_a_warning_and_fails_where_gpus_are_asked_for(
    tmp_path: Path,
) -> None:
    machine = replace(GOOD, gpus=8)
    assert check("build", machine).status is CheckStatus.WARN
    wants = loaded(tmp_path, "pools.decode.resources.gpus=1")
    found = check("build", machine, wants)
    assert found.status is CheckStatus.FAIL
    assert pip_install("gpu") in found.fix


def test_a_build_for_gpus_without_any_is_a_warning() -> None:
    cuda = {**IMPORTS, "torch": ImportResult(version="2.14.0", cuda_version="13.0")}
    assert check("build", replace(GOOD, imports=cuda)).status is CheckStatus.WARN


def test_gpus_without_compilers_are_a_warning_with_the_command_that_installs_them() -> None:
    told = "got no g++, expected one on the PATH; install it (apt-get install g++)"
    found = check("kernels", replace(GOOD, gpus=1, kernel_compile_error=told))
    assert found.status is CheckStatus.WARN
    assert (found.detail, found.fix) == (
        "got no g++, expected one on the PATH",
        "install it (apt-get install g++)",
    )
    assert check("kernels", replace(GOOD, gpus=1)).status is CheckStatus.PASS


def test_packages_that_break_others_are_named_with_how_to_remove_them() -> None:
    found = check("other packages", replace(GOOD, conflicting_packages={"torchvision": "0.24.0"}))
    assert found.status is CheckStatus.FAIL
    assert found.fix == "pip uninstall torchvision"


def test_a_build_of_them_for_cpus_breaks_nothing() -> None:
    machine = replace(GOOD, conflicting_packages={"torchvision": "0.24.0+cpu"})
    assert check("other packages", machine).status is CheckStatus.PASS


# -------------------------------------------------------------------------------------- machine


def disks_with(free_bytes: int | UnknownFact) -> tuple[DiskFact, ...]:
    return (*GOOD.disks, DiskFact(purpose="models", path="/models", free_bytes=free_bytes))


@pytest.mark.parametrize(
    ("changes", "name", "verdict"),
    [
        ({"free_shared_memory_bytes": 60 * 1024**2}, "shared memory", CheckStatus.FAIL),
        ({"free_shared_memory_bytes": 256 * 1024**2}, "shared memory", CheckStatus.WARN),
        ({"disks": disks_with(1024**2)}, "disk", CheckStatus.FAIL),
        ({"disks": disks_with(GIB)}, "disk", CheckStatus.WARN),
        ({"disks": disks_with(UnknownFact("/models hangs"))}, "disk", CheckStatus.WARN),
        (
            {"fd_limits": FileDescriptorLimits(soft=256, hard=256)},
            "file descriptors",
            CheckStatus.FAIL,
        ),
        (
            {"fd_limits": FileDescriptorLimits(soft=1024, hard=65536)},
            "file descriptors",
            CheckStatus.WARN,
        ),
        (
            {"haproxy_warning": "HAProxy cannot be used (none); install it"},
            "front",
            CheckStatus.WARN,
        ),
        ({"clock_synchronized": False}, "clock", CheckStatus.WARN),
    ],
)
def test_too_little_of_something_is_said_with_its_fix(
    changes: dict[str, object], name: str, verdict: CheckStatus
) -> None:
    found = check(name, replace(GOOD, **changes))  # type: ignore[arg-type]  # one field each
    assert found.status is verdict
    assert found.fix
    assert found.why


def test_a_line_of_a_component_is_a_finding_with_its_remedy() -> None:
    assert Finding.from_line("a: one; two; mend it") == Finding("a: one; two", "mend it")
    assert Finding.from_line("a: one") == Finding("a: one", "")


@pytest.mark.parametrize(
    "name", ["free_shared_memory_bytes", "haproxy_warning", "clock_synchronized"]
)
def test_an_unknown_fact_is_skipped_with_the_reason(name: str) -> None:
    blind = replace(GOOD, **{name: UnknownFact("nobody tells")})  # type: ignore[arg-type]  # likewise
    (found,) = [other for other in all_checks(blind, None) if other.detail == "nobody tells"]
    assert found.status is CheckStatus.SKIP


# -------------------------------------------------------------------------------- configuration


def test_the_running_deployment_may_hold_its_own_port_and_memory(config: DeploymentConfig) -> None:
    taken = PortFact(key="server.port", host="127.0.0.1", port=80, free=False)
    poor = replace(GOOD, ports=(taken,), available_memory_bytes=0)
    found = {other.name: other for other in all_checks(poor, config, runs_at="http://h:80")}
    assert found["ports"].status is CheckStatus.PASS
    assert found["memory"].status is CheckStatus.SKIP


def test_a_token_file_that_others_can_read_fails_with_the_command_that_closes_it(
    config: DeploymentConfig, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o644)
    fact = file_fact("observability.token_file", token)
    found = check("token and key files", replace(GOOD, secrets=(fact,)), config)
    assert found.status is CheckStatus.FAIL
    assert f"{token} (observability.token_file) is open to others: 0644" in found.detail
    assert found.fix.startswith(f"chmod 600 {token}")
    token.chmod(0o600)
    closed = replace(GOOD, secrets=(file_fact("observability.token_file", token),))
    assert check("token and key files", closed, config).status is CheckStatus.PASS


def test_a_key_file_that_others_can_read_is_a_warning_for_it_holds_hashes(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o644)
    keys.chmod(0o644)
    config = loaded(tmp_path, f"tenants.acme.keys_file={keys}")
    found = check("token and key files", replace(GOOD, secrets=secret_files(config)), config)
    assert (found.status, found.fix) == (CheckStatus.WARN, f"chmod 600 {keys}")


@pytest.mark.parametrize(
    "fact",
    [
        FileFact(path="/t", purpose="observability.token_file", problem="No such file"),
        FileFact(path="/t", purpose="observability.token_file", mode=0o600, readable=False),
        FileFact(path="/t", purpose="observability.token_file", mode=0o600, empty=True),
    ],
)
def test_a_token_file_without_a_token_that_can_be_read_fails(
    config: DeploymentConfig, fact: FileFact
) -> None:
    found = check("token and key files", replace(GOOD, secrets=(fact,)), config)
    assert found.status is CheckStatus.FAIL
    assert "create /t" in found.fix


# ---------------------------------------------------------------------------------------- facts


def test_the_ports_and_secrets_of_a_configuration_are_found(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o640)
    config = loaded(
        tmp_path,
        "server.port=8123",
        "observability.metrics.port=0",
        f"observability.token_file={token}",
        "tenants.acme.keys_file=/none",
    )
    assert [(port_fact.key, port_fact.port) for port_fact in port_facts(config)] == [
        ("server.port", 8123)
    ]
    assert {(secret_file.purpose, secret_file.mode) for secret_file in secret_files(config)} == {
        ("keys of tenant acme", None),
        ("observability.token_file", token.stat().st_mode & 0o777),
    }


def test_a_slow_fact_is_unknown_and_delays_no_other() -> None:
    never = threading.Event()
    found = gather_fact(0.01, "the disk", never.wait)
    never.set()
    assert found == UnknownFact("the disk: nothing came within 0.01 s", is_late=True)


def test_facts_are_gathered_side_by_side_and_each_can_be_read_twice() -> None:
    meeting = threading.Barrier(2)  # passed only by two at once
    first, second = (PendingFact(10, name, meeting.wait) for name in ("first", "second"))
    assert {first.wait(), second.wait()} == {0, 1}
    assert first.wait() == first.wait()


def test_the_reason_of_a_fact_is_the_last_line_of_its_error() -> None:
    def fails() -> int:
        raise RuntimeError("Traceback (most recent call last):\n  File x\nOSError: the root\n")

    assert gather_fact(5, "it", fails) == UnknownFact("it: RuntimeError: OSError: the root")


def test_imports_that_take_long_on_a_busy_machine_are_no_failure() -> None:
    late = replace(GOOD, imports=UnknownFact("importing them: nothing came", is_late=True))
    assert check("imports", late).status is CheckStatus.WARN
    assert check("imports", replace(GOOD, imports=UnknownFact("crash"))).status is CheckStatus.FAIL


def test_the_fullest_disk_is_named_with_its_content() -> None:
    found = check("disk", replace(GOOD, disks=disks_with(1024**2)))
    assert found.detail == "1 MiB free in /models (models)"
    assert "/models" in found.fix


def test_the_disk_of_a_folder_that_does_not_exist_yet_is_that_of_its_parent(tmp_path: Path) -> None:
    (disk,) = gather_disks({"models": tmp_path / "a" / "b"})
    assert isinstance(disk.free_bytes, int)


def test_a_fact_that_cannot_be_had_is_unknown_with_its_reason() -> None:
    def fails() -> int:
        raise PermissionError(13, "not yours")

    assert gather_fact(5, "it", fails) == UnknownFact("it: PermissionError: [Errno 13] not yours")
    assert gather_fact(5, "it", lambda: 7) == 7


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if self.path == "/health" else 401)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_endpoint_that_is_not_well_says_so_and_one_that_asks_for_a_token_answers(
    url: str,
) -> None:
    assert health_problem(url) == "it answers 503"
    assert http_problem(url) == ""


def test_a_missing_deployment_is_reported_as_such() -> None:
    refused = "the connection is refused: nothing listens there"
    assert http_problem("http://127.0.0.1:1") == refused


# --------------------------------------------------------------------------------------- report


def test_checks_are_numbered_over_all_areas_and_one_failure_is_enough() -> None:
    good = Topic(name="a", why="it matters").passed("well")
    doubt = replace(good, name="b", status=CheckStatus.WARN)
    told = build_report([("machine", [good, doubt]), ("deployment", [good])])
    assert told["ok"] is True
    assert told["counts"] == {"pass": 2, "warn": 1, "fail": 0, "skip": 0}
    counts = told["counts"]
    assert isinstance(counts, dict)
    assert list(counts) == ["fail", "warn", "pass", "skip"]
    bad = replace(good, status=CheckStatus.FAIL)
    again = build_report([("machine", [good]), ("deployment", [bad])])
    assert again["ok"] is False
    rows = again["checks"]
    assert isinstance(rows, list)
    assert [(row["number"], row["area"], row["status"]) for row in rows] == [
        (1, "machine", "PASS"),
        (2, "deployment", "FAIL"),
    ]


def test_every_failed_check_says_why_it_matters_and_its_remedy(
    config: DeploymentConfig,
) -> None:
    broken = replace(
        GOOD,
        versions=dict.fromkeys(GOOD.versions),
        imports=UnknownFact("it hangs"),
        conflicting_packages={"torchaudio": "2.9"},
        available_memory_bytes=0,
        free_shared_memory_bytes=0,
        disks=disks_with(0),
        fd_limits=FileDescriptorLimits(soft=1, hard=1),
        haproxy_warning="it cannot be used; install it",
        clock_synchronized=False,
        ports=(PortFact(key="server.port", host="h", port=1, free=False),),
        secrets=(FileFact(path="/t", purpose="token", mode=0o666),),
    )
    bad = [
        other
        for other in all_checks(broken, config)
        if other.status in {CheckStatus.FAIL, CheckStatus.WARN}
    ]
    assert len(bad) >= 9
    assert all(
        failed_check.why and failed_check.fix and failed_check.detail for failed_check in bad
    )
    assert os.linesep not in "".join(failed_check.fix for failed_check in bad)
