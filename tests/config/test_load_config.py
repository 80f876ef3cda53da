"""Files, environment and options to one configuration, or to everything that is wrong."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
from ray import cloudpickle

from baton.config import (
    SecretRef,
    coordinator_limits,
    emits_cache_events,
    engine_env,
    index_options,
    load_config,
    predicted_options,
    probe_options,
    render,
    sim_settings,
)
from baton.config.load import MAX_FINDINGS, load_text
from baton.config.schema.deployment import EngineKind, SimTimings
from baton.config.schema.routing import Policy
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.errors import ConfigInvalid
from baton.domain.fleet import Role
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions
from baton.policy.prefix_cache.index import IndexMode, IndexOptions
from baton.simulator.engine.settings import SimSettings
from tests.config.conftest import MINIMAL_CONFIG, Load, Refuse

PD = MINIMAL_CONFIG.replace("{main: {role: mixed}}", "{p: {role: prefill}, d: {role: decode}}")
"""A prefill and a decode pool."""


def with_key(path: str, value: str) -> str:
    """The least configuration with a top-level section added."""
    return MINIMAL_CONFIG + f"{path}: {value}\n"


# ---------------------------------------------------------------------------------- what is read


def test_the_least_configuration_is_completed_with_defaults(load: Load) -> None:
    config = load(MINIMAL_CONFIG).config
    assert config.model_name == "tiny"
    pool = config.pools["main"]
    assert (pool.model, pool.role) == ("tiny", Role.MIXED)
    assert (pool.replicas.min, pool.replicas.initial, pool.replicas.max) == (1, 1, 1)
    assert config.server.port == 8000


def test_a_configuration_cannot_be_changed_and_travels_by_pickle(load: Load) -> None:
    config = load(PD).config
    with pytest.raises(FrozenInstanceError):
        config.version = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own bytes


_ECHO = """
import sys
from ray import cloudpickle
from baton.config.schema.deployment import DeploymentConfig

role, config = cloudpickle.loads(sys.stdin.buffer.read())
assert isinstance(config, DeploymentConfig)
sys.stdout.buffer.write(cloudpickle.dumps((role, config)))
"""
"""A process that imports no more than the schema, takes a configuration and sends it on."""


def test_ray_carries_a_configuration_to_a_process_and_back_as_text(load: Load) -> None:
    config = load(PD + "router: {seed: 7}\n").config
    sent = cloudpickle.dumps(("ingress", config))
    received = subprocess.run(
        [sys.executable, "-c", _ECHO], input=sent, stdout=subprocess.PIPE, check=True
    ).stdout
    for pickled in (sent, received):
        assert b"seed: 7" in pickled
        assert pickle.loads(pickled) == ("ingress", config)  # noqa: S301 - our own bytes
    assert copy.deepcopy(config) == config


def test_a_configuration_travels_as_text_that_another_version_can_read(load: Load) -> None:
    config = load(PD + "router: {seed: 7}\n").config
    sent = pickle.dumps(config)
    assert b"seed: 7" in sent
    of_an_older_version = "".join(
        line
        for line in render(config).splitlines(keepends=True)
        if "max_queued_requests:" not in line
    )
    assert load_text(of_an_older_version) == config
    with pytest.raises(ConfigInvalid, match="seeed"):
        load_text(render(config).replace("seed: 7", "seeed: 7"))
    for text in ("- a list", "a: [", ""):
        with pytest.raises(ConfigInvalid):
            load_text(text)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("{source: org/Some-Model-1.5B}", "Some-Model-1.5B"),
        ("{source: /data/models/llama/}", "llama"),
        ("{source: x, name: chat}", "chat"),
    ],
)
def test_the_short_form_names_the_model_by_its_source(load: Load, model: str, name: str) -> None:
    config = load(f"version: 1\nmodel: {model}\npools: {{main: {{role: mixed}}}}").config
    assert config.model_name == name
    assert config.pools["main"].model == name


def test_pools_inherit_engine_options_key_by_key(load: Load) -> None:
    config = load(
        "version: 1\n"
        "models: {m: {source: s, engine: {block_size: 32, extra: {seed: 1, a: 2}}}}\n"
        "pools: {p: {role: mixed, model: m, engine: {max_num_seqs: 8, extra: {a: 3}}}}\n"
    ).config
    engine = config.pools["p"].engine
    assert (engine.block_size_tokens, engine.max_num_seqs) == (32, 8)
    assert engine.extra == {"seed": 1, "a": 3}
    assert config.models["m"].engine.max_num_seqs is None


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ("{}", (1, 1, 1)),
        ("{min: 2}", (2, 2, 2)),
        ("{initial: 3}", (1, 3, 3)),
        ("{max: 4}", (1, 1, 4)),
        ("{min: 0, initial: 2}", (0, 2, 2)),
    ],
)
def test_counts_that_are_left_out_follow_the_others(
    load: Load, given: str, counts: tuple[int, int, int]
) -> None:
    replicas = (
        load(MINIMAL_CONFIG.replace("mixed", f"mixed, replicas: {given}"))
        .config.pools["main"]
        .replicas
    )
    assert (replicas.min, replicas.initial, replicas.max) == counts


def test_a_pool_may_rest_at_zero_beside_one_that_serves(load: Load) -> None:
    replicas = load(PD.replace("prefill", "prefill, replicas: {min: 0}")).config.pools["p"].replicas
    assert (replicas.min, replicas.initial, replicas.max) == (0, 0, 1)


def test_a_section_with_everything_commented_out_is_its_defaults(load: Load) -> None:
    assert (
        load(MINIMAL_CONFIG + "server:\n  # port: 1\nrouter:\n").config
        == load(MINIMAL_CONFIG).config
    )


def test_environment_variables_keep_their_text_and_their_case(load: Load) -> None:
    text = with_key("transfer", "{env: {UCX_TLS: tcp, A: 1.50, B: true, C_KEY: {env: MINE}}}")
    env = load(text).config.transfer.env
    assert env == {"UCX_TLS": "tcp", "A": "1.50", "B": "true", "C_KEY": SecretRef(env="MINE")}


# ------------------------------------------------------------------------------------- the layers


@pytest.mark.parametrize("low", ["text", "{env: A}", "{file: a}"])
@pytest.mark.parametrize("high", ["other", "{env: B}", "{file: b}"])
def test_where_a_variable_is_to_be_found_is_replaced_as_a_whole(
    load: Load, low: str, high: str
) -> None:
    below = with_key("transfer", f"{{env: {{X: {low}, Y: kept}}}}")
    alone = load(with_key("transfer", f"{{env: {{X: {high}, Y: kept}}}}")).config
    assert load(below, f"transfer: {{env: {{X: {high}}}}}\n").config == alone
    assert load(below, sets=[f"transfer.env.X={high}"]).config == alone
    assert load(below, env={"BATON__TRANSFER__ENV__X": high}).config == alone


def test_later_layers_win_key_by_key_and_lists_are_replaced(load: Load) -> None:
    base = (
        MINIMAL_CONFIG
        + "server: {host: h, port: 1, routes: [chat, models]}\n"
        + "admission: {max_queued_requests: 1}\n"
    )
    overlay = "server: {port: 2, routes: [health]}\nadmission: {max_queued_requests: 2}\n"
    loaded = load(
        base,
        overlay,
        env={
            "BATON__ADMISSION__MAX_QUEUED_REQUESTS": "3",
            "BATON__SERVER__PORT": "3",
            "BATON_OTHER": "x",
        },
        sets=["admission.max_queued_requests=4", "admission.max_queued_requests=5"],
    )
    server = loaded.config.server
    assert (server.host, server.port, server.routes) == ("h", 3, ("health",))
    assert loaded.config.admission.max_queued_requests == 5
    assert loaded.origins["server.host"] == "x0.yaml:4:16"
    assert loaded.origins["server.routes"] == "x1.yaml:1:27"
    assert loaded.origins["server.port"] == "env BATON__SERVER__PORT"
    assert loaded.origins["admission.max_queued_requests"] == "--set"
    assert loaded.origins["router.disaggregate"] == "default"


def test_a_section_with_everything_commented_out_keeps_what_pools_inherit(load: Load) -> None:
    text = (
        "version: 1\n"
        "model: {source: tiny, max_len: 64, engine: {dtype: float16, extra: {seed: 1}}}\n"
        "pools:\n  main:\n    role: mixed\n    engine:\n      # max_num_seqs: 8\n"
    )
    engine = load(text).config.pools["main"].engine
    assert engine.dtype == "float16"
    assert engine.extra == {"seed": 1}


@pytest.mark.parametrize(
    "overlay",
    [
        "slo:\n  # default: {ttft: 2s}\n",
        "slo: {default: }\n",
        "slo: {classes: {batch: }}\n",
        "model:\n  # revision: main\n",
        "model: {engine: }\n",
        "model: {engine: {extra: }}\n",
        "pools:\n",
        "pools: {main: }\n",
        "pools: {main: {env: , placement: {labels: }}}\n",
    ],
)
def test_an_overlay_with_everything_commented_out_changes_nothing(load: Load, overlay: str) -> None:
    base = (
        "version: 1\n"
        "model: {source: tiny, max_len: 64, engine: {dtype: float16, extra: {seed: 1}}}\n"
        "pools: {main: {role: mixed, env: {A: b}, placement: {labels: {rack: r}}}}\n"
        "slo: {default: {ttft: 1s}, classes: {batch: {ttft: 9s}}}\n"
    )
    alone, both = load(base), load(base, overlay)
    assert both.config == alone.config
    assert both.origins == alone.origins


def test_null_clears_what_may_be_null(load: Load) -> None:
    base = (
        "version: 1\n"
        "model: {source: tiny, max_len: 64, engine: {max_num_seqs: 4, extra: {a: {b: 1}}}}\n"
        "pools: {main: {role: mixed}}\n"
        "autoscaler: {}\n"
    )
    overlay = "model: {engine: {max_num_seqs: , extra: {a: }}}\nautoscaler:\n"
    config = load(base, overlay).config
    assert load(base).config.autoscaler is not None
    assert config.autoscaler is None
    assert config.pools["main"].engine.max_num_seqs is None
    assert config.pools["main"].engine.extra == {"a": None}


def test_every_leaf_has_an_origin(load: Load) -> None:
    loaded = load(PD, env={"BATON__TRANSFER__ENV__UCX_TLS": "tcp"})
    assert loaded.origins["pools.p.model"] == "default (the only model)"
    assert loaded.origins["transfer.env.UCX_TLS"] == "env BATON__TRANSFER__ENV__UCX_TLS"
    assert loaded.origins["admission.timeouts.stall"] == "default"


def test_environment_variables_reach_names_that_they_cannot_spell(load: Load) -> None:
    text = (
        "version: 1\nmodels: {Llama-3.1: {source: x}}\n"
        "pools: {my-pool: {role: mixed, model: Llama-3.1}}\n"
    )
    env = {"BATON__MODELS__LLAMA_3_1__MAX_LEN": "64", "BATON__POOLS__MY_POOL__PARALLEL__TP": "2"}
    config = load(text, env=env).config
    assert config.models["Llama-3.1"].max_len_tokens == 64
    assert config.pools["my-pool"].parallel.tp == 2


def test_set_reaches_names_with_dots_in_quotes(load: Load) -> None:
    text = "version: 1\nmodels: {a.b: {source: x}}\npools: {p: {role: mixed}}\n"
    loaded = load(text, sets=['models."a.b".max_len=64'])
    assert loaded.config.models["a.b"].max_len_tokens == 64
    assert loaded.origins['models."a.b".max_len'] == "--set"


def test_a_variable_for_one_key_wins_over_one_for_its_section(load: Load) -> None:
    names = {"BATON__SERVER__PORT": "2", "BATON__SERVER": "{port: 1, host: h}"}
    for env in (names, dict(reversed(names.items()))):
        server = load(MINIMAL_CONFIG, env=env).config.server
        assert (server.host, server.port) == ("h", 2)


def test_the_only_model_is_reached_by_its_short_form_however_the_file_names_it(load: Load) -> None:
    long_form = "version: 1\nmodels: {m: {source: x}}\npools: {p: {role: mixed}}\n"
    for text in (long_form, MINIMAL_CONFIG):
        config = load(text, env={"BATON__MODEL__MAX_LEN": "64"}, sets=["model.revision=r"]).config
        (found,) = config.models.values()
        assert (found.max_len_tokens, found.revision) == (64, "r")


def test_everything_can_be_said_without_a_file() -> None:
    loaded = load_config([], sets=["version=1", "model={source: x}", "pools.p.role=decode"])
    assert loaded.config.pools["p"].role is Role.DECODE


# -------------------------------------------------------------------------------- what is refused


def test_everything_that_is_wrong_is_said_at_once_in_the_order_of_the_lines(
    load_invalid: Refuse,
) -> None:
    findings = load_invalid(
        "version: 1\n"
        "observability: {logs: {prompts: true}}\n"
        "model: {source: tiny, max_len: many}\n"
        "pools:\n"
        "  p: {role: mixt, gpu: 1, replicas: {min: 3, initial: 2}}\n"
        "router: {policy: randm}\n",
        env={"BATON__SERVER__PORT": "0"},
        sets=["server.prot=1"],
    )
    assert findings == (
        "x0.yaml:2:24: observability.logs.prompts: not yet: prompts are never logged, remove it",
        "x0.yaml:3:32: model.max_len: got 'many', expected a whole number, at least 2",
        "x0.yaml:5:13: pools.p.role: got 'mixt', expected 'prefill', 'decode' or 'mixed', "
        "did you mean 'mixed'?",
        "x0.yaml:5:19: pools.p.gpu: unknown key, did you mean 'gpus' under 'resources'?",
        "x0.yaml:6:18: router.policy: got 'randm', expected 'predicted', 'random', 'round-robin', "
        "'least-loaded' or your own 'module:function', did you mean 'random'?",
        "env BATON__SERVER__PORT: server.port: got 0, expected a whole number, at least 1, "
        "at most 65535",
        "--set: server.prot: unknown key, did you mean 'port'?",
    )


def test_a_file_that_is_no_mapping_is_refused(load_invalid: Refuse) -> None:
    assert load_invalid("- a") == (
        "x0.yaml:1:1: got a list, expected a mapping of keys such as 'pools'",
    )


def test_a_file_that_cannot_be_read_keeps_quiet_about_what_it_might_have_said(
    load_invalid: Refuse,
) -> None:
    findings = load_invalid("a: [", "pools:\n\tp: 1\n")
    assert [finding.partition(": ")[0] for finding in findings] == ["x0.yaml:1:5", "x1.yaml:2:1"]


def test_thousands_of_findings_are_cut_short(load_invalid: Refuse) -> None:
    text = MINIMAL_CONFIG + "".join(f"zz{number}: 1\n" for number in range(150))
    findings = load_invalid(text)
    assert len(findings) == MAX_FINDINGS + 1
    assert findings[-1] == "and 50 more"


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ({"sets": ["port"]}, "--set: got 'port', expected path.to.key=value"),
        ({"sets": ["a..b=1"]}, "--set: got 'a..b', expected path.to.key=value"),
        ({"sets": ["=1"]}, "--set: got '', expected path.to.key=value"),
        ({"sets": ["server.routes.0=chat"]}, "--set: server.routes.0: server.routes is a list"),
        ({"sets": ["server.host=[a"]}, "--set: server.host: not YAML: while parsing a flow"),
        ({"env": {"BATON__": "1"}}, "env BATON__: expected a name such as BATON__SERVER__PORT"),
        (
            {"env": {"BATON__TENANTS": "1"}},
            "env BATON__TENANTS: tenants: got 1, expected a mapping",
        ),
    ],
)
def test_findings_name_the_option_or_variable_that_they_are_about(
    load_invalid: Refuse, options: dict[str, object], finding: str
) -> None:
    found = load_invalid(MINIMAL_CONFIG + "server: {routes: [chat]}\n", **options)
    assert len(found) == 1
    assert found[0].startswith(finding)


# ------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "text",
    [
        with_key("transfer", "{env: {HF_TOKEN: hunter2}}"),
        with_key("server", "{api_key: hunter2}"),
        MINIMAL_CONFIG.replace("4096", "4096, engine: {extra: {api_key: [hunter2, hunter2]}}"),
        MINIMAL_CONFIG.replace("4096", "4096, engine: {extra: {hf_token: hunter2}}"),
        MINIMAL_CONFIG.replace(
            "4096", "4096, engine: {extra: {hf_overrides: {password: hunter2}}}"
        ),
        MINIMAL_CONFIG.replace("4096", "4096, secret: hunter2"),
        with_key("transfer", "{env: {A_SECRET: [hunter2]}}"),
        with_key("transfer", "{env: {A_SECRET: {env: [hunter2]}}}"),
    ],
)
def test_a_secret_in_the_file_is_refused_and_not_repeated(load_invalid: Refuse, text: str) -> None:
    findings = load_invalid(text)
    assert findings
    assert "hunter2" not in "\n".join(findings)


def test_a_number_where_a_secret_is_referred_to_is_not_repeated(load_invalid: Refuse) -> None:
    (finding,) = load_invalid(with_key("transfer", "{env: {A_KEY: {env: 123456789}}}"))
    assert finding.startswith("x0.yaml:4:31: transfer.env.A_KEY.env: got a literal that is not")
    assert "123456789" not in finding


def test_a_secret_given_by_option_is_refused_and_not_repeated(load_invalid: Refuse) -> None:
    findings = load_invalid(MINIMAL_CONFIG, sets=["transfer.env.MY_API_KEY=hunter2"])
    assert findings == (
        "--set: transfer.env.MY_API_KEY: looks like a secret and is given as a literal, "
        "expected {env: NAME} or {file: PATH}",
    )


def test_a_secret_is_looked_up_only_when_an_engine_starts(load: Load) -> None:
    text = with_key("transfer", "{env: {A_KEY: {env: MINE}, B_KEY: {file: key}, C: d}}")
    config = load(text).config
    assert "hunter2" not in render(config)
    with pytest.raises(ConfigInvalid) as error:
        engine_env(config, "main", {})
    assert [finding.split(":")[0] for finding in error.value.problems] == [
        "transfer.env.A_KEY",
        "transfer.env.B_KEY",
    ]


def test_secrets_are_found_in_the_environment_and_in_files(load: Load) -> None:
    text = with_key("transfer", "{env: {A_KEY: {env: MINE}, B_KEY: {file: x0.yaml}, C: d}}")
    found = engine_env(load(text).config, "main", {"MINE": "hunter2"})
    assert found == {"A_KEY": "hunter2", "B_KEY": text.strip(), "C": "d"}


# ----------------------------------------------------------------------------------- cross checks

SIM = (
    "version: 1\nmodel: {source: tiny, max_len: 4096, engine: {kind: sim}}\n"
    "pools: {main: {role: mixed}}\n"
)


def main_pool(rest: str, base: str = MINIMAL_CONFIG) -> str:
    """A configuration whose only pool says a bit more."""
    return base.replace("mixed", f"mixed, {rest}")


def model(rest: str, base: str = MINIMAL_CONFIG) -> str:
    """A configuration whose model says a bit more."""
    return base.replace("4096", f"4096, {rest}")


@pytest.mark.parametrize(
    "text",
    [
        main_pool("replicas: {max: 2}") + "transfer: {side_channel: {port_base: 64536}}",
        main_pool("replicas: {max: 2}") + "server: {port: 21000}",
        with_key("transfer", "{side_channel: {bind: 10.0.0.1}}"),
        with_key("transfer", "{deadline: 5s, lease: 5s}"),
        with_key("admission", "{max_prompt_tokens: 4095}"),
        main_pool("resources: {gpus: 4}, parallel: {tp: 2, pp: 2}"),
        main_pool("resources: {gpus: 0.5}, engine: {gpu_memory_utilization: 0.5}"),
        PD.replace("role: prefill", "role: prefill, replicas: {min: 0}"),
        MINIMAL_CONFIG.replace("mixed", "decode"),
        with_key("router", "{policy: own.code:choose, disaggregate: auto}"),
        with_key("router", "{policy: random, disaggregate: never}"),
        main_pool("resources: {gpus: 1}, engine: {offload: {host_memory: 1B}}"),
        main_pool(
            "engine: {max_num_batched_tokens: 64, max_num_seqs: 64,"
            " max_num_batched_tokens_while_decoding: 64}"
        ),
        SIM.replace("sim}", "sim, offload: {host_memory: 2MiB}}"),
        SIM.replace("4096", "65536"),
        SIM.replace("sim}", "sim, max_num_seqs: 64, max_num_batched_tokens_while_decoding: 64}"),
    ],
)
def test_a_value_just_inside_a_bound_is_accepted(load: Load, text: str) -> None:
    load(text)


def test_the_same_mistake_in_two_places_is_said_twice(load_invalid: Refuse) -> None:
    sets = ["pools.p.engine.dtype=int4", "pools.d.engine.dtype=int4", "a=1", "b=1"]
    findings = load_invalid(PD, sets=sets)
    assert len(findings) == 4
    assert len(set(findings)) == 4


def test_a_mistake_in_an_option_that_pools_inherit_is_said_once(load_invalid: Refuse) -> None:
    (finding,) = load_invalid(PD, sets=["model.engine.dtype=int4"])
    assert finding.startswith("--set: model.engine.dtype: got 'int4'")


# --------------------------------------------------------------------------------- what is derived


def test_a_configuration_of_defaults_gives_the_coordinator_its_own_defaults(load: Load) -> None:
    assert coordinator_limits(load(MINIMAL_CONFIG).config) == CoordinatorLimits()


def test_the_coordinator_has_the_configured_limits(load: Load) -> None:
    text = (
        MINIMAL_CONFIG
        + "admission: {max_prompt_tokens: 8, max_queued_requests: 7, queue_timeout: 1s, timeouts: "
        "{first_token: 2s, stall: 3s, total: 4s, resume: 5s,"
        " drain: 8s}}\ntransfer: {deadline: 6s, lease: 7s, max_concurrent_pulls: 3}"
    )
    assert coordinator_limits(load(text).config) == CoordinatorLimits(
        max_prompt_tokens=8,
        max_queued_requests=7,
        queue_timeout_s=1.0,
        first_token_timeout_s=2.0,
        stall_timeout_s=3.0,
        total_timeout_s=4.0,
        resume_timeout_s=5.0,
        transfer_deadline_s=6.0,
        lease_s=7.0,
        max_pulls=3,
        drain_timeout_s=8.0,
    )


def test_simulated_engines_are_like_their_defaults_unless_told(load: Load) -> None:
    config = load(SIM).config
    engine = config.pools["main"].engine
    assert engine.kind is EngineKind.SIM
    assert engine.sim == SimTimings()
    assert sim_settings(engine, config.models["tiny"], config.transfer) == SimSettings(
        max_pulls=config.transfer.max_concurrent_pulls
    )


def test_a_pool_of_simulated_engines_needs_no_timings(load: Load) -> None:
    config = load(main_pool("engine: {kind: sim}")).config
    assert config.models["tiny"].engine.sim is None
    assert config.pools["main"].engine.sim == SimTimings()


def test_requests_are_placed_by_prediction_unless_told(load: Load) -> None:
    config = load(MINIMAL_CONFIG).config
    router = config.router
    assert (router.policy, router.index, router.disaggregate, router.seed) == (
        "predicted",
        IndexMode.HYBRID,
        Disaggregate.AUTO,
        0,
    )
    assert predicted_options(config) == PredictedOptions()
    assert index_options(config) == IndexOptions()
    assert probe_options(config) == ProbeOptions()
    assert config.transfer.max_concurrent_pulls == 8


def test_pairs_are_probed_as_often_and_as_long_as_the_configuration_says(load: Load) -> None:
    text = with_key("transfer", "{probe: {interval: 9s, deadline: 20s}, max_concurrent_pulls: }")
    config = load(text).config
    assert probe_options(config) == ProbeOptions(
        interval_s=9.0, deadline_s=20.0, first_transfer_s=20.0
    )
    assert config.transfer.max_concurrent_pulls is None


def test_placement_aims_at_the_objectives_of_the_default_class(load: Load) -> None:
    text = (
        MINIMAL_CONFIG
        + "slo: {default: {ttft: 500ms, tpot: 30ms}}\nrouter: {disaggregate: never}\n"
    )
    assert predicted_options(load(text).config) == PredictedOptions(
        ttft_slo_s=0.5, tpot_slo_s=0.03, disaggregate=Disaggregate.NEVER
    )


@pytest.mark.parametrize("policy", [str(known) for known in Policy] + ["own:code"])
def test_plain_policies_split_what_they_can_unless_told(load: Load, policy: str) -> None:
    loaded = load(with_key("router", f"{{policy: {policy}}}"))
    decides = policy in {"predicted", "own:code"}
    assert loaded.config.router.disaggregate == ("auto" if decides else "always")
    if not decides:
        origin = f"default (policy '{policy}' does not decide about it)"
        assert loaded.origins["router.disaggregate"] == origin
    never = load(with_key("router", f"{{policy: {policy}, disaggregate: never}}")).config
    assert never.router.disaggregate is Disaggregate.NEVER


@pytest.mark.parametrize(
    ("index", "caching", "wanted"),
    [
        ("hybrid", "true", True),
        ("events", "true", True),
        ("predicted", "true", False),
        ("hybrid", "false", False),
    ],
)
def test_engines_say_what_they_cache_where_the_index_wants_it(
    load: Load, index: str, caching: str, *, wanted: bool
) -> None:
    text = main_pool(f"engine: {{prefix_caching: {caching}}}") + f"router: {{index: {index}}}\n"
    config = load(text).config
    assert index_options(config).mode == index
    assert emits_cache_events(config, "main") is wanted


def test_a_simulated_engine_offloads_as_many_whole_blocks_as_fit(load: Load) -> None:
    text = SIM.replace(
        "sim}", "sim, offload: {host_memory: 7MiB}, sim: {host_rate: 1GB/s, decode_kv: 2ms}}"
    )
    config = load(text).config
    found = sim_settings(config.pools["main"].engine, config.models["tiny"], config.transfer)
    assert (found.host_blocks, found.host_bytes_per_s, found.decode_kv_s) == (3, 1e9, 0.002)


@pytest.mark.parametrize(
    "text",
    [
        *("true", "null", "~", "7", "1e3", ".5", "2s", "a: b", "#x", "- a", "*a", "'", "é", "x y"),
        *("\x00", "\t", "\n", "\x7f", "\x85", "\xa0", "\u2028", "\ud800", "\ufeff", "\ufffe", "😀"),
    ],
    ids=ascii,
)
def test_odd_texts_are_rendered_so_that_they_read_back(load: Load, text: str) -> None:
    config = load(MINIMAL_CONFIG).config
    extra = {"x": text, "y": {text: [text]}}
    engine = replace(config.models["tiny"].engine, extra=extra)
    model = replace(config.models["tiny"], engine=engine)
    pool = replace(config.pools["main"], engine=engine)
    odd = replace(config, models={"tiny": model}, pools={"main": pool})
    assert load(render(odd)).config == odd


def test_simulated_engines_take_what_they_share_with_real_ones_from_there(load: Load) -> None:
    text = SIM.replace(
        "kind: sim}",
        "kind: sim, block_size: 32, dtype: float16, max_num_seqs: 8, max_num_batched_tokens: 64, "
        "sim: {prefill_rate: 1k/s, kv_block_size: 1MiB, speed: 2}}",
    )
    config = load(text + "transfer: {deadline: 1s, lease: 9s, on_failure: fail}").config
    found = sim_settings(config.pools["main"].engine, config.models["tiny"], config.transfer)
    assert found == replace(
        SimSettings(),
        block_size_tokens=32,
        kv_dtype="float16",
        max_running_requests=8,
        max_batched_tokens=64,
        prefill_tokens_per_s=1000.0,
        kv_block_bytes=1024**2,
        speed=2.0,
        side_channel_deadline_s=1.0,
        lease_s=9.0,
        max_pulls=8,
        on_transfer_failure=found.on_transfer_failure.FAIL,
    )
