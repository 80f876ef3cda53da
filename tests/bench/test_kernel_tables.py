"""Tables of kernel times: which rows count, and what is said when they cannot be read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.bench.accuracy.kernel_tables import (
    attention_observations,
    compare_all_reduces,
    compare_products,
)
from baton.domain.errors import PreflightFailed, TraceInvalid
from tests.perf.shapes import H100

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def table(path: Path, rows: list[dict[str, object]]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_products_of_models_one_would_serve_are_compared(tmp_path: Path) -> None:
    row = {"gemm_dtype": "bfloat16", "m": 4096, "n": 10240, "k": 8192, "latency": 0.8763}
    rows = [
        row,
        row | {"gemm_dtype": "fp8", "latency": 0.5956},
        row | {"n": 64},
        row | {"gemm_dtype": "fp8_block"},
        row | {"k": 51200},
    ]
    found = compare_products(table(tmp_path / "gemm.parquet", rows), H100)
    assert [residual.name for residual in found] == [
        "bfloat16 4096x10240x8192",
        "fp8 4096x10240x8192",
    ]
    assert all(abs(residual.error) < 0.1 for residual in found)


def test_all_reduces_in_graphs_are_compared_by_their_bytes(tmp_path: Path) -> None:
    row = {"backend": "vllm_graph", "num_gpus": 8, "message_size": 67108864, "latency": 0.5774}
    rows = [
        row,
        row | {"message_size": 128, "latency": 0.0047},
        row | {"backend": "vllm_eager"},
    ]
    found = compare_all_reduces(table(tmp_path / "reduce.parquet", rows), H100)
    assert [residual.name for residual in found] == ["8 x 134217728 bytes", "8 x 256 bytes"]
    assert found[0].error == pytest.approx(0.32, abs=0.05)
    assert found[1].error == pytest.approx(0.13, abs=0.05)


def test_attention_of_prompts_and_of_decodes_is_compared(tmp_path: Path) -> None:
    row = {
        "op_name": "context_attention",
        "batch_size": 1,
        "isl": 8192,
        "num_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "kv_cache_dtype": "bfloat16",
        "step": 0,
        "window_size": 0,
        "latency": 0.912,
    }
    decode = row | {"op_name": "generation_attention", "batch_size": 32, "isl": 1, "step": 4095}
    rows = [
        row,
        decode | {"latency": 0.1859},
        decode | {"latency": 0.114, "kv_cache_dtype": "fp8"},
        row | {"window_size": 128},
        row | {"head_dim": 64},
        row | {"num_heads": 12},
    ]
    found = attention_observations(table(tmp_path / "attention.parquet", rows), H100)
    assert len(found) == 3
    for measurement in found:
        assert sum(measurement.parts) == pytest.approx(measurement.measured_s, rel=0.12)


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gemm.parquet"
    path.write_text("no parquet")
    with pytest.raises(TraceInvalid, match=r"gemm\.parquet: not a parquet table"):
        compare_products(path, H100)
    with pytest.raises(TraceInvalid, match="no column gemm_dtype, k, latency"):
        compare_products(table(path, [{"m": 1, "n": 2}]), H100)


def test_without_pyarrow_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        PreflightFailed, match="needs pyarrow: install baton with the extra 'report'"
    ):
        compare_products(tmp_path / "gemm.parquet", H100)
