"""Pools go on following their models in what is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.config.load import LoadedConfig, load_config, load_text
from baton.manifests.cluster_deployment import adapt_to_cluster, explicit_config_values

MODEL = "models: {m: {source: org/model, engine: {dtype: bfloat16, extra: {seed: 1}}}}"


def loaded(tmp_path: Path, pool: str, *more: str) -> LoadedConfig:
    path = tmp_path / "config.yaml"
    lines = ["version: 1", MODEL, f"pools: {{decode: {{role: mixed, {pool}}}}}", *more]
    path.write_text("\n".join(lines) + "\n")
    return load_config([path])


def engine_of(written: object) -> object:
    found = json.loads(json.dumps(written))
    return found["pools"]["decode"].get("engine")


def test_a_pool_that_says_nothing_of_engines_is_exported_without_a_word_of_them(
    tmp_path: Path,
) -> None:
    given = loaded(tmp_path, "env: {A: b}")
    assert engine_of(explicit_config_values(given)) is None
    assert engine_of(adapt_to_cluster(given).explicit_values) is None


def test_a_change_of_the_models_options_reaches_pools_of_an_exported_file(tmp_path: Path) -> None:
    written = json.loads(
        json.dumps(explicit_config_values(loaded(tmp_path, "engine: {max_num_seqs: 8}")))
    )
    written["models"]["m"]["engine"] = {"dtype": "float16", "extra": {"seed": 2}}
    pool = load_text(json.dumps(written)).pools["decode"].engine
    assert (pool.dtype, pool.extra, pool.max_num_seqs) == ("float16", {"seed": 2}, 8)


def test_what_a_pool_says_itself_is_kept_even_where_its_model_says_the_same(
    tmp_path: Path,
) -> None:
    given = loaded(tmp_path, "engine: {dtype: bfloat16, extra: {swap_space: 2}}")
    wanted = {"dtype": "bfloat16", "extra": {"swap_space": 2}}
    assert engine_of(explicit_config_values(given)) == wanted


@pytest.mark.parametrize("more", [(), ("tenants: {a: {}}",)])
def test_the_exported_file_means_what_the_given_one_does(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    given = loaded(tmp_path, "engine: {max_num_seqs: 8}", *more)
    written = explicit_config_values(given)
    assert load_text(json.dumps(written)) == given.config
    assert engine_of(written) == {"max_num_seqs": 8}
