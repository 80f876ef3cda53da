"""How many GPUs a process may use, and what vLLM is told where it is none."""

# ruff: noqa: N802 - a stand-in for NVIDIA's library has its names

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from baton.engine.cuda_home import CannotCompileError, check_compilers, create_toolkit
from baton.engine.gpus import (
    count_gpus,
    count_present_gpus,
    driver_problem,
    gpu_start_lock,
    mig_devices,
    use_cpu_without_gpus,
)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("1", 1),
        ("0,1", 2),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0, 1", 2),
        ("7", 0),
        ("0,7,1", 1),
        ("GPU-8932f937-d72c", 1),
        ("MIG-2f1a,MIG-77bc,MIG-90aa", 3),
    ],
)
def test_gpus_that_are_hidden_or_not_there_are_not_counted(visible: str | None, count: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, lambda: 2) == count
    assert count_gpus(environ, lambda: 0) == 0


def test_without_nvidias_library_the_kernel_is_asked(tmp_path: Path) -> None:
    assert count_present_gpus(tmp_path / "no-driver") == 0


def test_vllm_computes_on_cpus_where_there_is_no_gpu_and_only_there() -> None:
    environ: dict[str, str] = {}
    use_cpu_without_gpus(environ, lambda: 1)
    assert environ == {}
    use_cpu_without_gpus(environ, lambda: 0)
    assert environ == {"VLLM_TARGET_DEVICE": "cpu"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    use_cpu_without_gpus(hidden, lambda: 8)
    assert hidden["VLLM_TARGET_DEVICE"] == "cpu"
    chosen = {"VLLM_TARGET_DEVICE": "rocm"}
    use_cpu_without_gpus(chosen, lambda: 0)
    assert chosen == {"VLLM_TARGET_DEVICE": "rocm"}


def test_engines_on_one_gpu_start_one_after_the_other(tmp_path: Path) -> None:
    first, second = {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}
    asked, entered = threading.Event(), threading.Event()

    def given_up() -> bool:
        asked.set()
        return False

    def start() -> None:
        with gpu_start_lock(first, given_up, tmp_path):
            entered.set()

    starting = threading.Thread(target=start, daemon=True)
    with gpu_start_lock(first, lambda: False, tmp_path):
        starting.start()
        assert asked.wait(60), "it does not wait"
        with gpu_start_lock(second, lambda: False, tmp_path):
            pass  # another GPU is another matter
        assert not entered.is_set()
    assert entered.wait(60)
    starting.join(60)


def test_after_giving_up_a_start_takes_no_lock(tmp_path: Path) -> None:
    with gpu_start_lock({}, lambda: True, tmp_path), gpu_start_lock({}, lambda: True, tmp_path):
        pass


@pytest.mark.parametrize(
    ("torch", "driver", "old"),
    [
        ("2.14.0+cu130", (12, 9), True),
        ("2.14.0+cu130", (13, 0), False),
        ("2.14.0+cu132", (13, 0), False),
        ("2.9.0+cu128", (12, 4), False),
        ("2.14.0+cu130", None, False),
        ("2.13.0+cpu", (12, 4), False),
        (None, (12, 4), False),
    ],
)
def test_a_driver_is_too_old_where_its_cuda_is_of_an_earlier_major_version(
    torch: str | None, driver: tuple[int, int] | None, *, old: bool
) -> None:
    assert (driver_problem(torch, driver) is not None) is old


class Nvml(ModuleType):
    """NVIDIA's library on a machine whose GPUs have so many slices each; None: it is not cut."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    def __init__(self, *slices: int | None) -> None:
        super().__init__("pynvml")
        self._slices = slices

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self._slices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[int, int | None]:
        return index, None

    def nvmlDeviceGetMigMode(self, gpu: tuple[int, int | None]) -> list[int]:
        if self._slices[gpu[0]] is None:
            raise self.NVMLError("not supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: tuple[int, int | None]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(
        self, gpu: tuple[int, int | None], number: int
    ) -> tuple[int, int | None]:
        if number >= (self._slices[gpu[0]] or 0):
            raise self.NVMLError("not found")
        return gpu[0], number

    def nvmlDeviceGetUUID(self, device: tuple[int, int | None]) -> str:
        gpu, number = device
        return f"GPU-{gpu}" if number is None else f"MIG-{gpu}-{number}"


@pytest.mark.parametrize(
    ("gpus", "count", "named"),
    [
        ((None, None), 2, ()),
        ((3,), 3, ("MIG-0-0", "MIG-0-1", "MIG-0-2")),
        ((2, None), 3, ("MIG-0-0", "MIG-0-1", "GPU-1")),
        ((0,), 0, ()),
    ],
)
def test_slices_of_a_gpu_are_counted_and_named_for_ray(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[int | None], count: int, named: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(*gpus))
    assert count_present_gpus() == count
    assert count_gpus({}) == count
    assert mig_devices({}) == named
    assert mig_devices({"CUDA_VISIBLE_DEVICES": "0"}) == ()
    assert mig_devices({"CUDA_VISIBLE_DEVICES": "MIG-0-1, MIG-0-2"}) == ("MIG-0-1", "MIG-0-2")


# -------------------------------------------------------------------- where CUDA is


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """What the wheels put down, as far as it is looked at."""
    program(tmp_path / "cu13" / "bin" / "nvcc")
    (tmp_path / "cu13" / "include").mkdir()
    (tmp_path / "cu13" / "lib").mkdir()
    (tmp_path / "cu13" / "lib" / "libcudart.so.13").write_bytes(b"")
    (tmp_path / "cu13" / "lib" / "libcudart_static.a").write_bytes(b"")
    return tmp_path / "cu13"


def compilers() -> dict[str, str]:
    """Variables with which the compiler of this machine is found, and no nvcc."""
    found = shutil.which("g++")
    assert found, "no g++ was found: apt-get install g++"
    return {"PATH": str(Path(found).parent)}


def test_a_toolkit_has_names_to_link_against_and_a_driver_to_find_later(
    kit: Path, tmp_path: Path
) -> None:
    home = tmp_path / "deep" / "cuda"
    create_toolkit(kit, home, compilers())
    assert (home / "bin" / "nvcc").resolve() == kit / "bin" / "nvcc"
    assert (home / "include").is_dir()
    assert (home / "lib64" / "libcudart.so").resolve() == kit / "lib" / "libcudart.so.13"
    assert (home / "lib64" / "libcudart_static.a").exists()
    assert (home / "lib64" / "stubs" / "libcuda.so").stat().st_size > 0
    assert check_compilers({**compilers(), "CUDA_HOME": str(home)}) == home / "bin" / "nvcc"
    with pytest.raises(FileExistsError):
        create_toolkit(kit, home, compilers())


def test_nvcc_is_looked_for_as_flashinfer_does(tmp_path: Path) -> None:
    gxx, said = program(tmp_path / "a" / "g++"), program(tmp_path / "b" / "bin" / "nvcc")
    usual = program(tmp_path / "c" / "bin" / "nvcc")
    path = {"PATH": str(gxx.parent)}
    assert check_compilers(path, usual.parents[1]) == usual
    on_path = program(gxx.parent / "nvcc")
    assert check_compilers(path, usual.parents[1]) == on_path
    assert check_compilers({**path, "CUDA_HOME": str(said.parents[1])}, usual.parents[1]) == said


def test_a_missing_tool_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(CannotCompileError, match=r"no g\+\+.*apt-get install g\+\+"):
        check_compilers({"PATH": str(tmp_path)}, tmp_path)
    program(tmp_path / "g++")
    with pytest.raises(CannotCompileError, match=r"no nvcc.*baton\.engine\.cuda_home ~/cuda"):
        check_compilers({"PATH": str(tmp_path)}, tmp_path)
    with pytest.raises(CannotCompileError, match=r"no g\+\+"):
        create_toolkit(tmp_path, tmp_path / "cuda", {"PATH": str(tmp_path / "none")})
