"""Reads a model's shape from its Hugging Face `config.json`, whose keys differ among families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.shape import Experts, LatentAttention, ModelShape

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
    | {"RefinedWebModel", "mpt", "phi", "starcoder2", "nemotron", "arcee", "apertus"}
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
_TIED_BY_DEFAULT = frozenset(
    {"gpt2", "gpt_bigcode", "gpt_neo", "bloom", "opt", "falcon", "RefinedWeb", "RefinedWebModel"}
    | {"mpt", "gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "starcoder2"}
)
"""Model types whose configuration classes in Hugging Face transformers default to tied embeddings
(`tie_word_embeddings`)."""
_UNSUPPORTED_MODEL_TYPES = frozenset(
    {"mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "qwen3_next", "recurrent_gemma"}
    | {"granitemoehybrid", "falcon_h1", "zamba", "zamba2", "nemotron_h", "plamo2", "minimax"}
    | {"t5", "mt5", "umt5", "bart", "mbart", "whisper", "bert", "roberta", "deberta", "lfm2"}
    | {"jetmoe"}
)
"""Model types with layers other than attention, or that are not decoders."""
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
    },
}
"""Keys that smaller models of a family omit; the defaults of its configuration class."""

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
_ENCODERS: Mapping[str, str] = {
    "vision_config": "the vision encoder",
    "audio_config": "the audio encoder",
}
"""Keys of encoders beside the language model."""
_OFTEN_NOT_GATED = frozenset({"relu2", "xielu"})
"""Activations of feed-forwards with and without a gate: the model type decides."""
_GATED_THOUGH = frozenset({"bitnet"})
_REMEDY = "give the shape of a similar model with attention in every layer"

_DTYPE_BY_QUANTIZATION = {
    "fp8": Dtype.FP8,
    "fp8_pb_wo": Dtype.FP8,
    "fp8_per_channel_per_token": Dtype.FP8,
    "w4a16_awq": Dtype.INT4,
    "w4a8_awq": Dtype.INT4,
    "fbgemm_fp8": Dtype.FP8,
    "fp4": Dtype.FP4,
    "mxfp4": Dtype.FP4,
    "nvfp4": Dtype.FP4,
    "modelopt_fp4": Dtype.FP4,
    "awq": Dtype.INT4,
    "gptq": Dtype.INT4,
    "int4": Dtype.INT4,
    "int8": Dtype.INT8,
}
_DTYPE_BY_TORCH_NAME = {
    "float32": Dtype.FP32,
    "float": Dtype.FP32,
    "bfloat16": Dtype.BF16,
    "float16": Dtype.FP16,
    "half": Dtype.FP16,
}


def from_config(config: Mapping[str, object], *, name: str) -> ModelShape:
    """The shape that a Hugging Face `config.json` describes; errors mention `name`.

    Raises:
        UnknownModel: a key is missing or invalid, or the architecture is not supported.
    """
    config_json = _ConfigJson(config, name)
    hidden = config_json.count("hidden_size", "n_embd", "d_model")
    heads = config_json.count("num_attention_heads", "n_head", "n_heads", "num_heads")
    layers = config_json.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    latent = _latent(config_json)
    window_tokens, windowed_layers = config_json.window_layout(layers)
    head_dim = latent.nope_dim + latent.rope_dim if latent else config_json.head_dim(hidden, heads)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if latent else config_json.kv_heads(heads),
        head_dim=head_dim,
        ffn_width=config_json.ffn_width(hidden),
        vocab=config_json.count("vocab_size", "padded_vocab_size"),
        gated_ffn=config_json.gated_ffn,
        tied_embeddings=config_json.tied_embeddings,
        latent=latent,
        indexer_dim=config_json.optional_count("index_head_dim") if latent else None,
        indexer_layers=config_json.indexer_layers(layers) if latent else None,
        experts=_experts(config_json, layers),
        window_tokens=window_tokens,
        windowed_layers=windowed_layers,
        max_len_tokens=config_json.max_len_tokens,
        left_out=tuple(part for key, part in _ENCODERS.items() if config.get(key)),
    )


def weights_dtype(config: Mapping[str, object]) -> Dtype:
    """Storage type of most weights, according to a `config.json`."""
    return _ConfigJson(config, "").weights_dtype


def kv_dtype(config: Mapping[str, object]) -> Dtype | None:
    """Storage type of the KV cache that a quantized `config.json` asks for; None if it does not.

    Source: `get_kv_cache_quant_algo_string` of vLLM 0.32's `utils/torch_utils.py`, and its
    `Attention` layer for compressed-tensors.
    """
    return _ConfigJson(config, "").kv_dtype


def _latent(config_json: _ConfigJson) -> LatentAttention | None:
    if config_json.optional_count("kv_lora_rank") is None:
        return None
    return LatentAttention(
        kv_rank=config_json.count("kv_lora_rank"),
        rope_dim=config_json.count("qk_rope_head_dim"),
        nope_dim=config_json.count("qk_nope_head_dim"),
        value_dim=config_json.count("v_head_dim"),
        query_rank=config_json.optional_count("q_lora_rank"),
    )


def _experts(config_json: _ConfigJson, layers: int) -> Experts | None:
    count = config_json.optional_count(
        "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"
    )
    if count is None or count == 1 or not config_json.has_experts:
        return None
    active = config_json.count(
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"
    )
    width = config_json.count("moe_intermediate_size", "expert_hidden_size", "intermediate_size")
    return Experts(
        count=count,
        active=active,
        width=width,
        shared=config_json.shared_experts(width),
        dense_layers=config_json.dense_layers(layers),
    )


class _ConfigJson:
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
        self._defaults = _DEFAULTS.get(self.model_type, {})
        if self.model_type in _UNSUPPORTED_MODEL_TYPES:
            raise UnknownModel(
                f"{name}: got model_type {self.model_type!r}, expected a decoder whose layers all"
                " have attention",
                _REMEDY,
            )
        self._check_structure()

    def _check_structure(self) -> None:
        """Refuse a structure that a shape cannot describe, by its keys rather than its name."""
        types = self._config.get("layer_types")
        if isinstance(types, Sequence) and not isinstance(types, str):
            for other in sorted({str(type_) for type_ in types} - _ATTENTION_TYPES):
                self._refuse("layer_types", other)
        kinds = self._config.get("attn_type_list")  # 1: attention, 0: linear attention
        if isinstance(kinds, Sequence) and not all(kinds):
            self._refuse("attn_type_list", "linear attention")
        if self._root.get("is_encoder_decoder") is True:
            self._refuse("is_encoder_decoder", "an encoder")
        for key in _ENCODER_KEYS:
            if self._config.get(key) is not None:
                self._refuse(key, "an encoder")
        for key, value in self._config.items():
            # `True` equals 1, which as a period means every layer.
            is_used = value and (value is True or value != 1 or key not in _PERIODS)
            if is_used and (reason := _other_layers(key)) is not None:
                self._refuse(key, reason)

    def _refuse(self, key: str, got: str) -> None:
        raise UnknownModel(
            f"{self._name}: its config has {key!r}: got {got}, expected layers of full or windowed"
            " attention with heads of one size",
            _REMEDY,
        )

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
                "give the shape of a similar model that is known by name",
            )
        return value

    def optional_count(self, *names: str) -> int | None:
        """`count`, but None when no key is present, or its value is null or 0."""
        for key in names:
            value = self._config.get(key, self._defaults.get(key))
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UnknownModel(
                    f"{self._name}: its config has {key!r}: got {value!r},"
                    " expected a whole number above 0",
                    "use the config.json that came with the weights",
                )
            return value or None
        return None

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
                "use the config.json that came with the weights",
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
        period = self.optional_count("sliding_window_pattern") or _WINDOW_PERIODS.get(
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
        """Of a layer without experts; Llama 4 has its own key for it."""
        if self.model_type == "mpt":
            return hidden * (self.optional_count("expansion_ratio") or 4)
        names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "feed_forward_dim")
        dense_width = self.optional_count("intermediate_size_mlp")
        if dense_width is not None:
            return dense_width
        if self.model_type in _DEFAULT_FFN_4X:
            return self.optional_count(*names) or 4 * hidden
        return self.count(*names)

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
                "give the shape of a similar model that is known by name",
            )
        return True

    @property
    def has_experts(self) -> bool:
        """Whether a switch for experts, where there is one, is on."""
        return self._config.get("is_moe") is not False

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
        if (start := self._config.get("moe_layer_start_index")) is not None:
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
            value = config.get("tie_word_embeddings")
            if isinstance(value, bool):
                return value
        return self.model_type in _TIED_BY_DEFAULT

    @property
    def max_len_tokens(self) -> int:
        """The most tokens of prompt and output together."""
        names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
        return self.optional_count(*names) or _DEFAULT_MAX_LEN

    @property
    def kv_dtype(self) -> Dtype | None:
        """Storage type of the KV cache, if the quantization has one."""
        quantized = self._config.get("quantization_config", self._root.get("quantization_config"))
        if not isinstance(quantized, Mapping):
            return None
        scheme = quantized.get("kv_cache_scheme")
        if isinstance(scheme, Mapping) and scheme.get("type") == "float":
            return _DTYPE_BY_QUANTIZATION.get(f"fp{scheme.get('num_bits')}")
        return _DTYPE_BY_QUANTIZATION.get(str(quantized.get("kv_cache_quant_algo")).lower())

    @property
    def weights_dtype(self) -> Dtype:
        """Storage type of most weights."""
        quantized = self._config.get("quantization_config", self._root.get("quantization_config"))
        if isinstance(quantized, Mapping):
            return _quantized_dtype(quantized)
        for config in (self._config, self._root):
            dtype_name = config.get("torch_dtype", config.get("dtype"))
            if dtype_name is not None:
                return _DTYPE_BY_TORCH_NAME.get(str(dtype_name), Dtype.BF16)
        return Dtype.BF16


_WINDOW_PERIODS: Mapping[str, int] = {
    "gemma2": 2,
    "gpt_oss": 2,
    "llama4_text": 4,
    "cohere2": 4,
    "gemma3": 6,
    "gemma3_text": 6,
}
"""Every n-th layer attends to all tokens, where older configs do not list layers."""
_INTEGER_DTYPE_BY_BITS: Mapping[int, Dtype] = {4: Dtype.INT4, 8: Dtype.INT8}
"""Of weights that are packed as integers."""
_DEFAULT_MAX_LEN = 2048
"""Training length of models without a key for it (BLOOM, early Falcon)."""


def _other_layers(key: str) -> str | None:
    """The kind of layers other than attention that a key configures; None if it does not."""
    for prefix, reason in _OTHER_LAYER_PREFIXES.items():
        if key.startswith(prefix):
            return reason
    return _OTHER_LAYERS.get(key)


def _quantized_dtype(quantized: Mapping[str, object]) -> Dtype:
    method = str(quantized.get("quant_method", "")).lower()
    algorithm = str(quantized.get("quant_algo", "")).lower()
    bits = quantized.get("bits", quantized.get("w_bit"))
    for flag, flag_bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):  # bitsandbytes
        bits = flag_bits if quantized.get(flag) else bits
    if isinstance(bits, int) and bits in _INTEGER_DTYPE_BY_BITS:
        return _INTEGER_DTYPE_BY_BITS[bits]
    for scheme in (algorithm, method):
        if bits is None and scheme in _DTYPE_BY_QUANTIZATION:
            return _DTYPE_BY_QUANTIZATION[scheme]
    groups = quantized.get("config_groups")
    first_group = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first_group.get("weights") if isinstance(first_group, Mapping) else None
    if isinstance(weights, Mapping):
        kind = "fp" if weights.get("type") == "float" else "int"
        scheme = f"{kind}{weights.get('num_bits')}"
        if scheme in _DTYPE_BY_QUANTIZATION:
            return _DTYPE_BY_QUANTIZATION[scheme]
    got = ", ".join(filter(None, (method, algorithm, f"{bits} bits" if bits else "")))
    raise UnknownModel(
        f"quantization_config: got {got or 'no method'}, expected one of"
        f" {', '.join(sorted(_DTYPE_BY_QUANTIZATION))}, or 4 or 8 bits",
        "say how the weights are stored, as '--dtype int4'",
    )
