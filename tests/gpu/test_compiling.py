"""A kernel of FlashInfer's is compiled by what the wheels bring, laid out as the image does it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.fake_gpus import clean_environment, needs_cuda_build, run_program

pytestmark = [needs_cuda_build, pytest.mark.timeout(900)]
COMPILE = """
from flashinfer.jit.page import gen_page_module
module = gen_page_module()
module.build(verbose=False)
print(module.get_library_path())
"""


def test_the_compiler_the_headers_and_the_libraries_fit_each_other(tmp_path: Path) -> None:
    home = tmp_path / "cuda"
    command = [sys.executable, "-m", "baton.engine.cuda_home", str(home)]
    laid_out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert laid_out.stdout == f"export CUDA_HOME={home} PATH={home}/bin:$PATH\n"
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), str(home / "bin"), os.environ["PATH"]]
    )
    environ = clean_environment() | {
        "PATH": path,
        "CUDA_HOME": str(home),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "MAX_JOBS": "1",
    }
    library = run_program(COMPILE, environ, timeout_s=840)
    assert Path(library).stat().st_size > 0
