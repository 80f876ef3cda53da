"""The keys of a Hugging Face `config.json`, whose names differ among families."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Never

from baton.domain.errors import UnknownModel
from baton.perf.model.class_defaults import (
    CLASS_DEFAULTS,
    LISTED,
    TIED_BY_DEFAULT,
    WINDOW_PERIODS,
)

_NOT_GATED = frozenset(
    {
        "gpt2",
        "gpt_bigcode",
        "gptj",
        "gpt_neo",
        "codegen",
        "gpt_neox",
        "opt",
        "bloom",
        "falcon",
        "RefinedWeb",
    }
    | {"RefinedWebModel", "mpt", "phi", "starcoder2", "nemotron", "arcee", "apertus", "nemotron_h"}
    | {"jais2", "nanochat", "persimmon"}
)
"""Model types whose feed-forward has two matrices."""
_DEFAULT_FFN_4X = frozenset(
    {
        "gpt2",
        "gpt_bigcode",
        "gptj",
        "gpt_neo",
        "codegen",
        "bloom",
        "falcon",
        "RefinedWeb",
        "RefinedWebModel",
    }
    | {"mpt"}
)
"""Model types whose feed-forward width defaults to four times the hidden size."""
_UNSUPPORTED_MODEL_TYPES = frozenset(
    {"mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "zamba", "zamba2", "plamo2"}
    | {"minimax", "t5", "mt5", "umt5", "bart", "mbart", "whisper", "bert", "roberta", "deberta"}
    | {"jetmoe"}
)
"""Model types with layers other than attention, or that are not decoders."""

_ATTENTION_TYPES = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "deepseek_sparse_attention"}
    | {"indexed_attention"}
)
"""Of `layer_types`; others keep a state instead of keys and values, or none."""
_OTHER_LAYERS: Mapping[str, str] = {
    "linear_attn_config": "linear attention",
    "linear_num_key_heads": "linear attention",
    "full_attention_interval": "linear attention",
    "layer_group_size": "linear attention",
    "conv_L_cache": "convolutions",
    "conv_dim": "convolutions",
    "ssm_cfg": "a state-space model",
    "hybrid_override_pattern": "a state-space model",
    "attn_layer_period": "a state-space model",
    "block_configs": "layers of different shapes",
    "compress_ratios": "attention to compressed keys",
    "sparse_attention_config": "sparse attention with keys of its own",
    "global_head_dim": "layers with heads of different sizes",
    "swa_num_key_value_heads": "layers with heads of different sizes",
    "swa_head_dim": "layers with heads of different sizes",
    "cross_attention_layers": "attention to another sequence",
    "num_global_key_value_heads": "layers with heads of different sizes",
    "attention_output_gate": "gated attention",
    "layers_block_type": "layers of different shapes",
    "moe_latent_size": "experts of a latent",
    "attn_layer_indices": "a state-space model",
    "full_attn_idxs": "convolutions",
    "o_lora_rank": "an output of low rank",
    "attn_output_gate": "gated attention",
    "per_layer_config": "layers of different shapes",
    "hidden_size_per_layer_input": "embeddings of each layer",
    "num_kv_shared_layers": "layers that share keys and values",
    "use_double_wide_mlp": "layers of different shapes",
    "attention_k_eq_v": "keys that are values",
    "depth_decoder_config": "a second decoder",
    "H_cycles": "layers that run several times",
}
"""Keys of structures that a shape cannot describe."""
_PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "moe_layer_freq",
    "indexer_types",
    "attn_type_list",
    "hybrid_layer_pattern",
    "no_rope_layers",
)
"""Lists with an item for each layer."""
_PERIODS = frozenset(
    {"full_attention_interval", "layer_group_size", "attn_layer_period", "H_cycles"}
)
_ENCODER_KEYS = ("type_vocab_size", "attention_probs_dropout_prob")
"""Keys of BERT and its descendants."""
_OTHER_LAYER_PREFIXES: Mapping[str, str] = {
    "mamba_": "a state-space model",
    "ssm_": "a state-space model",
    "rwkv": "a recurrent network",
}
ENCODERS: Mapping[str, str] = {
    "vision_config": "the vision encoder",
    "audio_config": "the audio encoder",
}
"""Keys of encoders beside the language model."""
_OFTEN_NOT_GATED = frozenset({"relu2", "xielu"})
"""Activations of feed-forwards with and without a gate: the model type decides."""
_GATED_THOUGH = frozenset({"bitnet"})
_REMEDY = "name a similar model that is known, or give its config.json"

_FFN_WIDTHS: Final = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "feed_forward_dim",
    "block_ff_dim",
)
_DEFAULT_MAX_LEN = 2048
"""Training length of models without a key for it (BLOOM, early Falcon)."""


class ConfigKeys:
    """One file, or its part for the language model."""

    __slots__ = ("_config", "_defaults", "_name", "_root")

    def __init__(self, config: Mapping[str, object], name: str) -> None:
        self._root = config
        self._name = name
        nested = next(
            (
                config[key]
                for key in ("text_config", "llm_config", "language_config")
                if key in config
            ),
            None,
        )
        self._config: Mapping[str, object] = nested if isinstance(nested, Mapping) else config
        self._defaults = CLASS_DEFAULTS.get(self.model_type, {})
        if self.model_type in _UNSUPPORTED_MODEL_TYPES:
            raise UnknownModel(
                f"{name}: got model_type {self.model_type!r}, expected a decoder whose layers are"
                " known here",
                _REMEDY,
            )

    def check_structure(self, understood: Collection[str] = ()) -> None:
        """Refuse a structure that a shape cannot describe, by its keys rather than its name.

        The caller reads those that are `understood`: keys, prefixes of keys and types of layers.

        Raises:
            UnknownModel: there is one.
        """
        self._check_layer_lists(understood)
        if self._root.get("is_encoder_decoder") is True:
            self.refuse("is_encoder_decoder", "an encoder")
        for key in _ENCODER_KEYS:
            if self._config.get(key) is not None:
                self.refuse(key, "an encoder")
        for key, value in self._config.items():
            if any(key.startswith(known) for known in understood):
                continue
            # `True` equals 1, which as a period means every layer.
            is_used = value and (value is True or value != 1 or key not in _PERIODS)
            if is_used and (reason := _other_layers(key)) is not None:
                self.refuse(key, reason)

    def _check_layer_lists(self, understood: Collection[str]) -> None:
        for key, types in LISTED.items():
            if self.model_type in types and not self.texts(key):
                self.refuse(key, "no list", "a type for each layer")
        for key in ("layer_types", "layers_block_type"):
            for other in sorted(set(self.texts(key)) - _ATTENTION_TYPES - set(understood)):
                self.refuse(key, other)
        if len(set(self.texts("num_attention_heads_per_layer"))) > 1:
            self.refuse("num_attention_heads_per_layer", "layers with different heads")
        kinds = self._config.get("attn_type_list")  # 1: attention, 0: linear attention
        if isinstance(kinds, Sequence) and not all(kinds):
            self.refuse("attn_type_list", "linear attention")

    def check_lengths(self, layers: int) -> None:
        """Refuse a list that has not one item for each layer.

        Raises:
            UnknownModel: there is one.
        """
        for key in _PER_LAYER:
            value = self._config.get(key)
            if isinstance(value, list) and value and len(value) != layers:
                self.refuse(key, f"{len(value)} items", f"one for each of {layers} layers")

    def refuse(self, key: str, got: str, expected: str = "layers that a shape describes") -> Never:
        """Raise that a key's structure is not supported."""
        raise UnknownModel(
            f"{self._name}: its config has {key!r}: got {got}, expected {expected}", _REMEDY
        )

    def value(self, key: str) -> object:
        """The value of a key in the language model's part, else in the whole, else of its class.

        None if there is none.
        """
        return self._config.get(key, self._root.get(key, self._defaults.get(key)))

    def texts(self, key: str) -> Sequence[str]:
        """A list of names; empty if there is none."""
        value = self._config.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str):
            return []
        return [str(item) for item in value]

    @property
    def model_type(self) -> str:
        """The architecture's name in `transformers`; empty when it is absent."""
        return str(self._config.get("model_type") or self._root.get("model_type") or "")

    def count(self, *names: str) -> int:
        """The first of these keys that is present.

        Raises:
            UnknownModel: no key is present, or the value is not a positive integer.
        """
        value = self.optional_count(*names)
        if value is None:
            others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            raise UnknownModel(
                f"{self._name}: its config has no {names[0]!r}{others}",
                _REMEDY,
            )
        return value

    def optional_count(self, *names: str) -> int | None:
        """`count`, but None when its value is null or 0, or no key is present.

        Where none is present, the class of the model may have a default.
        """
        for key in names:
            value = self._config.get(key)
            if isinstance(value, list) and value:
                value = self._common(key, value)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UnknownModel(
                    f"{self._name}: its config has {key!r}: got {value!r},"
                    " expected a whole number above 0",
                    _REMEDY,
                )
            return value or None
        if any(key in self._config for key in names):
            return None
        return next((self._defaults[key] for key in names if key in self._defaults), None)

    def _common(self, key: str, values: Sequence[object]) -> object:
        """The value that all layers of a list have."""
        if any(value != values[0] for value in values):
            self.refuse(key, "values that differ between layers", "one value for all layers")
        return values[0]

    # ------------------------------------------------------------------ attention

    def kv_heads(self, heads: int) -> int:
        """Heads of keys and values; defaults to the number of query heads."""
        if self.model_type in {"falcon", "RefinedWeb", "RefinedWebModel", "gpt_bigcode"}:
            return self._multi_query_heads(heads)
        keys = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
        return self.optional_count(*keys) or heads

    def _multi_query_heads(self, heads: int) -> int:
        """Falcon and BigCode: a switch means one head, unless the newer key states a count."""
        is_grouped = self._config.get("new_decoder_architecture") or self.model_type == "RefinedWeb"
        if is_grouped:
            return self.optional_count("num_kv_heads", "n_head_kv") or heads
        return 1 if self._config.get("multi_query", True) else heads

    def head_dim(self, hidden: int, heads: int) -> int:
        """Of one head."""
        value = self.optional_count("head_dim", "kv_channels")
        if value is None and hidden % heads:
            raise UnknownModel(
                f"{self._name}: a hidden size of {hidden} cannot be split among {heads} heads"
                " and its config has no 'head_dim'",
                _REMEDY,
            )
        return value or hidden // heads

    def window_layout(self, layers: int) -> tuple[int | None, int]:
        """Tokens of the window, and the number of layers that have it."""
        window = self.optional_count("sliding_window", "attention_chunk_size")
        is_used = self._config.get("use_sliding_window", not self._is_qwen())
        if window is None or not is_used:
            return None, 0
        windowed = self._windowed_layers(layers)
        return (window, windowed) if windowed else (None, 0)

    def _windowed_layers(self, layers: int) -> int:
        types = self._config.get("layer_types")
        if isinstance(types, Sequence) and not isinstance(types, str):
            return sum(type_ in {"sliding_attention", "chunked_attention"} for type_ in types)
        no_rope = self._config.get("no_rope_layers")
        if isinstance(no_rope, Sequence) and no_rope:
            return sum(1 for item in no_rope if item)
        period = self.optional_count("sliding_window_pattern") or WINDOW_PERIODS.get(
            self.model_type
        )
        if period is not None:
            return layers - layers // period
        from_layer = self.optional_count("max_window_layers") if self._is_qwen() else None
        return max(0, layers - from_layer) if from_layer is not None else layers

    def _is_qwen(self) -> bool:
        return self.model_type.startswith("qwen")

    def indexer_layers(self, layers: int) -> int | None:
        """Layers with an indexer of their own; None if all have one.

        Source: `DeepseekV2MLAAttention` of vLLM 0.32, `models/deepseek_v2.py`.
        """
        if types := self.texts("indexer_types"):
            return sum(type_ == "full" for type_ in types)
        period = self.optional_count("index_topk_freq") or 1
        pattern = self._config.get("index_topk_pattern")
        if isinstance(pattern, str) and pattern:
            return layers - pattern.count("S")
        if period == 1:
            return None
        offset = self.optional_count("index_skip_topk_offset") or 2
        return sum(max(layer - offset + 1, 0) % period == 0 for layer in range(layers))

    # ------------------------------------------------------------------ feed-forward

    def ffn_width(self, hidden: int) -> int:
        """Of a layer without experts; Llama 4 has its own key for it.

        Raises:
            UnknownModel: there is none.
        """
        return self.optional_ffn_width(hidden) or self.count(*_FFN_WIDTHS)

    def optional_ffn_width(self, hidden: int) -> int | None:
        """`ffn_width`, but None when no key is present."""
        if self.model_type == "mpt":
            return hidden * (self.optional_count("expansion_ratio") or 4)
        width = self.optional_count("intermediate_size_mlp", "dense_intermediate_size")
        width = width or self.optional_count(*_FFN_WIDTHS)
        return width or (4 * hidden if self.model_type in _DEFAULT_FFN_4X else None)

    @property
    def gated_ffn(self) -> bool:
        """Whether the feed-forward has a gate."""
        if self.model_type in _NOT_GATED:
            return False
        activation = self._config.get("hidden_act")
        if activation in _OFTEN_NOT_GATED and self.model_type not in _GATED_THOUGH:
            raise UnknownModel(
                f"{self._name}: its config has 'hidden_act': got {activation!r}, expected a model"
                " type of which it is known whether the feed-forward has a gate",
                _REMEDY,
            )
        return True

    def has_part(self, key: str) -> bool:
        """Whether the whole model has this part beside its language model."""
        return bool(self._root.get(key))

    @property
    def has_experts(self) -> bool:
        """Whether a switch for experts, where there is one, is on."""
        return self.value("is_moe") is not False

    def shared_experts(self, width: int) -> int:
        """Experts that every token passes through, in widths of a routed expert."""
        total = self.optional_count("shared_expert_intermediate_size")
        if total is not None:
            return max(1, round(total / width))
        if self.model_type.startswith("llama4"):
            return 1
        keys = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        return self.optional_count(*keys) or 0

    def dense_layers(self, layers: int) -> int:
        """Layers without experts: the first n, all but each n-th, or a list."""
        for key, dense_value in (("moe_layer_freq", 0), ("mlp_layer_types", "dense")):
            kinds = self._config.get(key)
            if isinstance(kinds, Sequence) and not isinstance(kinds, str) and kinds:
                return sum(kind == dense_value for kind in kinds)
        if (start := self.value("moe_layer_start_index")) is not None:
            return layers - self._listed_expert_layers(start, layers)
        dense_layer_ids = self._config.get("mlp_only_layers")
        dense = self.optional_count("first_k_dense_replace", "num_dense_layers") or 0
        dense += len(dense_layer_ids) if isinstance(dense_layer_ids, Sequence) else 0
        sparse_period = self.optional_count("decoder_sparse_step", "moe_layer_freq") or 1
        sparse_period = self.optional_count("interleave_moe_layer_step") or sparse_period
        return min(layers, dense + (layers - dense) - (layers - dense) // sparse_period)

    def _listed_expert_layers(self, start: object, layers: int) -> int:
        """Layers with experts from a first to a last index, each n-th (ERNIE 4.5)."""
        end = self._config.get("moe_layer_end_index", -1)
        if not isinstance(start, int) or not isinstance(end, int):
            raise UnknownModel(
                f"{self._name}: its config has 'moe_layer_start_index': got {start!r} to {end!r},"
                " expected two numbers",
                _REMEDY,
            )
        last = layers - 1 if end < 0 else min(end, layers - 1)
        period = self.optional_count("moe_layer_interval") or 1
        return sum((layer + 1) % period == 0 for layer in range(start, last + 1))

    # ------------------------------------------------------------------ the rest

    @property
    def tied_embeddings(self) -> bool:
        """Whether the embeddings are also the output matrix."""
        for config in (self._config, self._root):
            value = config.get("tie_word_embeddings", config.get("tie_embedding"))
            if isinstance(value, bool):
                return value
        return self.model_type in TIED_BY_DEFAULT

    @property
    def max_len_tokens(self) -> int:
        """The most tokens of prompt and output together."""
        names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
        return self.optional_count(*names) or _DEFAULT_MAX_LEN


def _other_layers(key: str) -> str | None:
    """The kind of layers other than attention that a key configures; None if it does not."""
    for prefix, reason in _OTHER_LAYER_PREFIXES.items():
        if key.startswith(prefix):
            return reason
    return _OTHER_LAYERS.get(key)
