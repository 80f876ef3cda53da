"""Which pools can hand blocks to each other: what a configuration says against NIXL's own hash."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from baton.config.load import load_text
from baton.domain.errors import ConfigInvalid
from baton.engine.vllm.core.settings import engine_arguments
from baton.serving.replica.engines import ReplicaSite, vllm_settings
from tests.fakes.tiny_model import tiny_model

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        compute_nixl_compatibility_hash,
    )

    from baton.engine.vllm.core.facts import engine_config

Json = Mapping[str, Any]


class Pair(NamedTuple):
    """Engine arguments of a prefill and of a decode pool."""

    prefill: Json = {}  # noqa: RUF012 - nobody writes it
    decode: Json = {}  # noqa: RUF012


def drafts(**more: object) -> Json:
    return {"speculative_config": {"num_speculative_tokens": 2, **more}}


EAGLE = drafts(method="eagle3", model="$DRAFTS")
FP8: Json = {"kv_cache_dtype": "fp8_e5m2"}
PAIRS: Mapping[str, Pair] = {
    "nothing said": Pair(),
    "blocks of another type": Pair(decode=FP8),
    "blocks of that type in both": Pair(FP8, FP8),
    "the type that is taken anyhow": Pair(decode={"kv_cache_dtype": "auto"}),
    "the model's type, by name": Pair(decode={"kv_cache_dtype": "bfloat16"}),
    "one pool of blocks": Pair(decode={"disable_hybrid_kv_cache_manager": True}),
    "several pools of blocks, as anyhow": Pair(decode={"disable_hybrid_kv_cache_manager": False}),
    "as vLLM likes it": Pair(decode={"disable_hybrid_kv_cache_manager": None}),
    "drafts in one": Pair(decode=EAGLE),
    "drafts in both": Pair(EAGLE, EAGLE),
    "other drafts": Pair(EAGLE, drafts(method="eagle3", model="$OTHERS")),
    "drafts whose method is in their name": Pair(EAGLE, drafts(model="$DRAFTS")),
    "drafts whose method is in their name, in one": Pair(decode=drafts(model="$DRAFTS")),
    "more drafts": Pair(EAGLE, {**EAGLE, **drafts(method="eagle3", model="$DRAFTS")}),
    "drafts of another revision": Pair(
        EAGLE, drafts(method="eagle3", model="$DRAFTS", revision="b")
    ),
    "blocks of drafts as the model's": Pair(
        EAGLE, drafts(method="eagle3", model="$DRAFTS", kv_cache_dtype="auto")
    ),
    "blocks of drafts of another type": Pair(
        EAGLE, drafts(method="eagle3", model="$DRAFTS", kv_cache_dtype="fp8_e5m2")
    ),
    "blocks of drafts as the model's fp8": Pair(
        {**EAGLE, **FP8},
        {**drafts(method="eagle3", model="$DRAFTS", kv_cache_dtype="fp8_e5m2"), **FP8},
    ),
    "drafts one after the other": Pair(
        EAGLE, drafts(method="eagle3", model="$DRAFTS", parallel_drafting=False)
    ),
    "drafts from the prompt": Pair(decode=drafts(method="ngram", prompt_lookup_max=3)),
    "another attention": Pair(
        {"attention_backend": "CPU_ATTN"}, {"attention_backend": "FLASH_ATTN"}
    ),
    "the same attention, said in two ways": Pair(
        {"attention_backend": "CPU_ATTN"}, {"attention_config": {"backend": "cpu_attn"}}
    ),
    "a model made smaller": Pair(decode={"hf_overrides": {"num_hidden_layers": 2}}),
    "more sequences": Pair(decode={"max_logprobs": 3, "seed": 7}),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Where models are; a draft model's configuration without its weights is enough."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model(folder)
    config = json.loads((model / "config.json").read_text())
    found = {"$MODEL": str(model)}
    for word, name in (("$DRAFTS", "tiny-eagle3"), ("$OTHERS", "other-eagle3")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(
            json.dumps(
                {**config, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
            )
        )
        found[word] = str(folder / name)
    return found


def document(pair: Pair, places: Mapping[str, str], *, pools: tuple[str, ...]) -> str:
    said = {
        "version": 1,
        "model": {"source": "$MODEL", "max_len": 512},
        "pools": {
            name: {
                "role": name if len(pools) > 1 else "mixed",
                "engine": {"dtype": "bfloat16", "extra": getattr(pair, name)},
            }
            for name in pools
        },
    }
    text = json.dumps(said)
    for word, place in places.items():
        text = text.replace(word, place)
    return text


def nixl_hash(pair: Pair, places: Mapping[str, str], pool: str) -> str:
    """By vLLM, of an engine of one pool."""
    config = load_text(document(pair, places, pools=(pool,)))
    site = ReplicaSite(
        replica_id=f"{pool}-x",
        pool=pool,
        host="127.0.0.1",
        reserve_ports=lambda _host, base, _count: base,
    )
    made = engine_config(engine_arguments(vllm_settings(config, site), None))
    # Which attention it comes to is found with the device; what is asked for, here.
    return str(compute_nixl_compatibility_hash(made, str(made.attention_config.backend)))


@pytest.mark.parametrize("name", PAIRS)
def test_pools_are_refused_just_where_nixl_would_refuse_each_handoff(
    name: str, places: Mapping[str, str]
) -> None:
    pair = PAIRS[name]
    differ = nixl_hash(pair, places, "prefill") != nixl_hash(pair, places, "decode")
    text = document(pair, places, pools=("prefill", "decode"))
    if not differ:
        load_text(text)
        return
    with pytest.raises(ConfigInvalid, match="as in pool 'prefill': they exchange KV blocks"):
        load_text(text)
