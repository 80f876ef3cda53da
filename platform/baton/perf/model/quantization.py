"""How the weights of a model are stored, matrix by matrix, as vLLM reads its `config.json`.

Each quantization is an ordered list of rules: names of matrices and their format. A matrix that no
rule names has 16 bits. Embeddings and routers have 16 bits in every quantization.

Source: `model_executor/layers/quantization` of vLLM 0.32, one module for each `quant_method`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Final

from baton.domain.errors import UnknownModel
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.config_keys import ConfigKeys
from baton.perf.model.layers import Module, Part, StoredWeights
from baton.perf.model.shape import ModelShape
from baton.perf.model.weight_formats import (
    ALWAYS_HALF,
    BF16,
    BLOCK,
    FP8,
    FP8_CHANNEL,
    MX_GROUP,
    MXFP4,
    MXFP8,
    Format,
    fp8_blocks,
    integers,
    nvfp4,
    uniform_weights,
)

_REMEDY: Final = "say how the weights are stored, as '--dtype int4'"
_REMEDY_KV: Final = "remove the scheme, and say '--kv-dtype fp8' where that is meant"
_PREFIX: Final = re.compile(
    r"^(model\.language_model\.|language_model\.model\.|language_model\.|backbone\.|model\.)"
)
"""Of names of matrices, which differ among families and engines."""
_ALIASES: Final = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")
_OUTPUT: Final = "lm_head"
_NAMES: Mapping[str, Mapping[str, str]] = {
    "minimax_m2": {"mlp.": "block_sparse_moe."},
    "mixtral": {"mlp.": "block_sparse_moe."},
    "kimi_linear": {"mlp.experts": "block_sparse_moe.experts"},
    "qwen2_moe": {"mlp.shared_experts": "mlp.shared_expert"},
    "qwen3_next": {"mlp.shared_experts": "mlp.shared_expert"},
    "qwen3_5_moe_text": {"mlp.shared_experts": "mlp.shared_expert"},
    "nemotron_h": {"self_attn.": "mixer.", "linear_attn.": "mixer.", "mlp.": "mixer."},
    "gemma4_text": {"mlp.experts": "experts", "mlp.gate": "router.proj"},
    "llama4_text": {"mlp.shared_experts": "feed_forward.shared_expert", "mlp.": "feed_forward."},
}
"""Names that families give to parts of a layer, where they are not Llama's."""


# --------------------------------------------------------------------------- which matrices


class _Names:
    """Patterns of names of matrices, and how they match."""

    __slots__ = ("_exact", "_expressions", "_parts", "_starts")

    def __init__(self, patterns: Sequence[str], *, by_part: bool = True) -> None:
        """With `by_part`, a pattern also matches where it is a part of a name between dots."""
        self._exact, self._parts, self._starts = set[str](), set[str](), list[str]()
        expressions = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                expressions.append(f"(?:{pattern[3:]})")
                continue
            stripped = _PREFIX.sub("", pattern)
            if not re.search(r"[*?\[]", stripped.removesuffix("*")):
                literal = stripped.removesuffix("*")
                if stripped.endswith("*"):
                    self._starts.append(literal)
                else:
                    self._exact.add(literal)
                    self._parts.update([literal] if by_part else [])
            else:
                expressions.append(translate(pattern))
        self._expressions = re.compile("|".join(expressions)) if expressions else None

    def __contains__(self, name: str) -> bool:
        """Whether a name without its prefix is matched."""
        if name in self._exact or name.startswith(tuple(self._starts)):
            return True
        if self._parts and not self._parts.isdisjoint(_parts_of(name)):
            return True
        if self._expressions is None:
            return False
        return any(self._expressions.match(alias + name) for alias in _ALIASES)


def _parts_of(name: str) -> Iterator[str]:
    """All runs of whole words of a dotted name."""
    words = name.split(".")
    for first in range(len(words)):
        for end in range(first + 1, len(words) + 1):
            yield ".".join(words[first:end])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheme:
    """A quantization: the format of each matrix by its name."""

    main: Format
    """Of most matrices that are quantized."""
    format_of: Callable[[str, Part], Format]


def _all_but(main: Format, ignored: Sequence[str], *, output: bool = False) -> _Scheme:
    """All matrices of layers but the ignored; the output matrix only with `output`."""
    names = _Names(ignored)

    def format_of(name: str, part: Part) -> Format:
        if part is Part.OUTPUT and not output:
            return BF16
        return BF16 if name in names else main

    return _Scheme(main=main, format_of=format_of)


def _experts_only(main: Format) -> _Scheme:
    return _Scheme(main=main, format_of=lambda _, part: main if part is Part.EXPERTS else BF16)


# --------------------------------------------------------------------------- methods


def _texts(quantized: Mapping[str, object], *keys: str) -> Sequence[str]:
    """The first of these lists that is there."""
    for key in keys:
        value = quantized.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [str(item) for item in value]
    return []


def _number(quantized: Mapping[str, object], *keys: str) -> int | None:
    values = (quantized.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int)), None)


def _read_fp8(quantized: Mapping[str, object]) -> _Scheme:
    ignored = _texts(quantized, "ignored_layers") or _texts(quantized, "modules_to_not_convert")
    return _all_but(fp8_blocks(quantized.get("weight_block_size")), ignored)


def _read_fbgemm(quantized: Mapping[str, object]) -> _Scheme:
    return _all_but(FP8_CHANNEL, _texts(quantized, "modules_to_not_convert"))


def _read_awq(quantized: Mapping[str, object]) -> _Scheme:
    bits = _number(quantized, "bits", "w_bit")
    group = _number(quantized, "group_size", "q_group_size")
    zero_point = quantized.get("zero_point") is not False
    main = integers(_expected_bits(quantized, bits), group, zero_point=zero_point)
    return _all_but(main, _texts(quantized, "modules_to_not_convert"))


def _read_gptq(quantized: Mapping[str, object]) -> _Scheme:
    """GPTQ stores zero points also when they are all the same.

    `dynamic` has expressions of names. After "-:" they stay in 16 bits, else they have own bits.
    """
    bits = _expected_bits(quantized, _number(quantized, "bits"))
    group = _number(quantized, "group_size")
    main, has_output = integers(bits, group), bool(quantized.get("lm_head"))
    dynamic = quantized.get("dynamic")
    rules = [
        (
            _Names([f"re:{expression.removeprefix('-:').removeprefix('+:')}"]),
            BF16
            if expression.startswith("-:") or not isinstance(changes, Mapping)
            else integers(
                _number(changes, "bits") or bits, _number(changes, "group_size") or group
            ),
        )
        for expression, changes in (dynamic.items() if isinstance(dynamic, Mapping) else ())
    ]
    ignored = _Names(_texts(quantized, "modules_to_not_convert"))

    def format_of(name: str, part: Part) -> Format:
        if name in ignored or (part is Part.OUTPUT and not has_output):
            return BF16
        return next((own for names, own in rules if name in names), main)

    return _Scheme(main=main, format_of=format_of)


def _read_auto_round(quantized: Mapping[str, object]) -> _Scheme:
    bits = _expected_bits(quantized, _number(quantized, "bits"))
    group, extra = _number(quantized, "group_size"), quantized.get("extra_config")
    zero_point = quantized.get("sym") is not True or "gptq" in str(quantized.get("packing_format"))
    main = integers(bits, group, zero_point=zero_point)
    rules = []
    for expression, changes in extra.items() if isinstance(extra, Mapping) else ():
        own_bits = _number(changes, "bits") if isinstance(changes, Mapping) else None
        own = integers(own_bits or bits, group) if (own_bits or bits) < 16 else BF16  # noqa: PLR2004
        rules.append((_Names([str(expression)]), own))

    def format_of(name: str, part: Part) -> Format:
        default = BF16 if part is Part.OUTPUT else main
        return next((own for names, own in rules if name in names), default)

    return _Scheme(main=main, format_of=format_of)


def _read_bitsandbytes(quantized: Mapping[str, object]) -> _Scheme:
    """4 bits in groups of 64 with scales of 32 bits, or of 8 with double quantization.

    Source: QLoRA (2305.14314), §3.
    """
    if quantized.get("load_in_8bit"):
        main = Format(dtype=Dtype.INT8, bits=8, scale_bytes=4)
    else:
        _expected_bits(quantized, 4 if quantized.get("load_in_4bit") else None)
        scale_bytes = 1 + 4 / 256 if quantized.get("bnb_4bit_use_double_quant") else 4
        main = Format(dtype=Dtype.INT4, bits=4, group=64, scale_bytes=scale_bytes)
    return _all_but(main, _texts(quantized, "llm_int8_skip_modules"))


def _read_compressed_tensors(quantized: Mapping[str, object]) -> _Scheme:
    """Groups of matrices, by kind ("Linear"), name or expression, each with its format."""
    groups = quantized.get("config_groups")
    groups = groups if isinstance(groups, Mapping) else {}
    rules: list[tuple[_Names | None, Format]] = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _unknown(quantized)
        targets = _texts(group, "targets")
        is_kind = not targets or any("Linear" in target for target in targets)
        own = _compressed_format(quantized, weights)
        rules.append((None if is_kind else _Names(targets, by_part=False), own))
    if not rules:
        raise _unknown(quantized)
    ignored = _Names(_texts(quantized, "ignore"), by_part=False)
    rules.sort(key=lambda rule: rule[0] is None)  # names before kinds

    def format_of(name: str, part: Part) -> Format:
        if name in ignored:
            return BF16
        for names, own in rules:
            if names is None and part is Part.OUTPUT:
                continue
            if names is None or name in names:
                return own
        return BF16

    return _Scheme(main=rules[-1][1], format_of=format_of)


def _compressed_format(quantized: Mapping[str, object], weights: Mapping[str, object]) -> Format:
    bits, group = _number(weights, "num_bits"), _number(weights, "group_size")
    is_float, strategy = weights.get("type") == "float", weights.get("strategy")
    match (is_float, bits):
        case (True, 8) if strategy == "block":
            blocks = weights.get("block_structure") or [BLOCK, BLOCK]
            return fp8_blocks(blocks)
        case (True, 8) if group == MX_GROUP:
            return MXFP8
        case (True, 8):
            return FP8_CHANNEL if strategy == "channel" else FP8
        case (True, 4):
            is_mx = group == MX_GROUP or "mxfp4" in str(quantized.get("format"))
            return MXFP4 if is_mx else nvfp4(group)
        case (False, int()):
            zero_point = weights.get("symmetric") is False
            return integers(_expected_bits(quantized, bits), group, zero_point=zero_point)
        case _:
            raise _unknown(quantized)


_MODELOPT: Mapping[str, Format] = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL,
    "FP8_PB_WO": fp8_blocks((BLOCK, BLOCK)),
    "NVFP4": nvfp4(None),
    "W4A16_NVFP4": nvfp4(None),
    "NVFP4_AWQ": nvfp4(None),
    "MXFP8": MXFP8,
    "W4A16_AWQ": integers(4, BLOCK, zero_point=False),
    "W4A8_AWQ": integers(4, BLOCK, zero_point=False),
}


def _read_modelopt(quantized: Mapping[str, object]) -> _Scheme:
    """NVIDIA's ModelOpt: one algorithm and its exceptions, or an algorithm for each matrix."""
    algorithm = str(quantized.get("quant_algo")).upper()
    ignored = _texts(quantized, "exclude_modules", "ignore")
    layers = quantized.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" and isinstance(layers, Mapping) and layers:
        return _each_layer(quantized, layers, ignored)
    if algorithm not in _MODELOPT:
        raise _unknown(quantized)
    if "NVFP4" in algorithm and not ("exclude_modules" in quantized or "ignore" in quantized):
        raise UnknownModel(
            f"quantization_config: got {algorithm} without 'exclude_modules', expected the names of"
            " matrices that are not quantized",
            _REMEDY,
        )
    main = _with_group(_MODELOPT[algorithm], _number(quantized, "group_size"))
    return _all_but(main, ignored, output=True)


def _each_layer(
    quantized: Mapping[str, object], layers: Mapping[str, object], ignored: Sequence[str]
) -> _Scheme:
    formats: dict[str, Format] = {}
    for name, recipe in layers.items():
        recipe = recipe if isinstance(recipe, Mapping) else {}  # noqa: PLW2901 - narrowed
        algorithm = str(recipe.get("quant_algo")).upper()
        if algorithm not in _MODELOPT:
            raise _unknown({**quantized, "quant_algo": algorithm})
        own = _with_group(_MODELOPT[algorithm], _number(recipe, "group_size"))
        formats[_PREFIX.sub("", name)] = own
    names = _Names(ignored)

    def format_of(name: str, part: Part) -> Format:
        del part
        if name in names:
            return BF16
        path = name
        while path:  # an entry may name a matrix, or the experts or the layer that it is in
            if path in formats:
                return formats[path]
            path = path.rpartition(".")[0]
        return BF16

    (main, _), *_ = Counter(formats.values()).most_common()
    return _Scheme(main=main, format_of=format_of)


def _with_group(main: Format, group: int | None) -> Format:
    is_grouped = group is not None and main.group is not None and main.outputs_of_scale == 1
    if not is_grouped:
        return main
    return Format(
        dtype=main.dtype,
        bits=main.bits,
        group=group,
        scale_bytes=main.scale_bytes,
        zero_bits=main.zero_bits,
    )


_READERS: Mapping[str, Callable[[Mapping[str, object]], _Scheme]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "mxfp4": lambda _: _experts_only(MXFP4),
    "gpt_oss_mxfp4": lambda _: _experts_only(MXFP4),
    "experts_int8": lambda _: _experts_only(Format(dtype=Dtype.INT8, bits=8, scale_bytes=4)),
    "awq": _read_awq,
    "awq_marlin": _read_awq,
    "gptq": _read_gptq,
    "gptq_marlin": _read_gptq,
    "auto-round": _read_auto_round,
    "bitsandbytes": _read_bitsandbytes,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "modelopt_mixed": _read_modelopt,
}
"""By `quant_method`."""


def _expected_bits(quantized: Mapping[str, object], bits: int | None) -> int:
    if bits not in {2, 3, 4, 8}:
        raise _unknown(quantized)
    return bits


def _unknown(quantized: Mapping[str, object]) -> UnknownModel:
    method, algorithm = quantized.get("quant_method"), quantized.get("quant_algo")
    bits = quantized.get("bits")
    got = [str(part) for part in (method, algorithm) if part]
    got += [f"{bits} bits"] if bits else []
    return UnknownModel(
        f"quantization_config: got {', '.join(got) or 'no method'}, expected one of"
        f" {', '.join(sorted(_READERS))} with its formats",
        _REMEDY,
    )


# --------------------------------------------------------------------------- what is asked


def stored_weights(config: Mapping[str, object], shape: ModelShape) -> StoredWeights:
    """How the weights of `shape` are stored, according to its `config.json`.

    Raises:
        UnknownModel: the quantization is not known.
    """
    keys = ConfigKeys(config, shape.name)
    quantized = _quantization(keys)
    if quantized is None:
        return uniform_weights(_torch_dtype(keys))
    scheme = _scheme(quantized)
    if (experts := _experts_format(keys, quantized)) is not None:
        scheme = _with_experts(scheme, experts)
    return _stored_by(scheme, keys.model_type, shape)


def _experts_format(keys: ConfigKeys, quantized: Mapping[str, object]) -> Format | None:
    """That of routed experts where it is not that of the rest.

    Source: `DeepseekV4FP8Config` of vLLM 0.32.
    """
    if keys.value("expert_dtype") != "fp4":
        return None
    return nvfp4(None) if quantized.get("moe_quant_algo") == "NVFP4" else MXFP4


def _with_experts(scheme: _Scheme, experts: Format) -> _Scheme:
    def format_of(name: str, part: Part) -> Format:
        return experts if part is Part.EXPERTS else scheme.format_of(name, part)

    return _Scheme(main=scheme.main, format_of=format_of)


def experts_only_weights(experts: Format, shape: ModelShape) -> StoredWeights:
    """Routed experts in one format, the rest in 16 bits."""
    return _stored_by(_experts_only(experts), "", shape)


def kv_dtype(config: Mapping[str, object]) -> Dtype | None:
    """Storage type of the KV cache that a quantized `config.json` asks for; None if it does not.

    Source: `get_kv_cache_quant_algo_string` of vLLM 0.32's `utils/torch_utils.py`, and its
    `CompressedTensorsKVCacheMethod.validate_kv_cache_scheme`.

    Raises:
        UnknownModel: vLLM refuses the scheme.
    """
    quantized = _quantization(ConfigKeys(config, ""))
    if quantized is None:
        return None
    scheme, kv = quantized.get("kv_cache_scheme"), quantized.get("kv_cache_quant_algo")
    is_modelopt = _method(quantized).startswith("modelopt")
    if isinstance(scheme, Mapping):
        kind, bits = scheme.get("type"), scheme.get("num_bits")
        if not is_modelopt and (kind, bits) != ("float", 8):
            raise UnknownModel(
                f"kv_cache_scheme: got {bits} bits of type {kind}, expected 8 of type float",
                _REMEDY_KV,
            )
        kv = f"fp{bits}" if kind == "float" else None
    elif scheme is not None and not isinstance(scheme, str):
        raise UnknownModel(
            f"kv_cache_scheme: got {scheme!r}, expected an object or a name", _REMEDY_KV
        )
    names = {"fp8": Dtype.FP8, "nvfp4": Dtype.FP4, "fp4": Dtype.FP4}
    return names.get(str(kv or scheme).lower())


def _quantization(keys: ConfigKeys) -> Mapping[str, object] | None:
    """Source: `ModelConfig._parse_quant_hf_config` of vLLM 0.32."""
    for key in ("quantization_config", "compression_config"):
        value = keys.value(key)
        if isinstance(value, Mapping):
            return value
    return None


def _method(quantized: Mapping[str, object]) -> str:
    method = str(quantized.get("quant_method") or "").lower()
    if not method and quantized.get("quant_algo"):
        return "modelopt"
    if not method and quantized.get("config_groups"):
        return "compressed-tensors"
    return method


def _scheme(quantized: Mapping[str, object]) -> _Scheme:
    read = _READERS.get(_method(quantized))
    if read is None:
        raise _unknown(quantized)
    return read(quantized)


def _stored_by(scheme: _Scheme, model_type: str, shape: ModelShape) -> StoredWeights:
    """Sums of all matrices by part and by type."""
    renames = _NAMES.get(model_type, {})
    part_bytes: Counter[Part] = Counter()
    part_parameters: Counter[Part] = Counter()
    types: Counter[tuple[Dtype, str]] = Counter()
    for name, module in _modules(shape, renames):
        own = BF16 if module.part in ALWAYS_HALF else scheme.format_of(name, module.part)
        part_bytes[module.part] += own.parameter_bytes(module) * module.parameters  # type: ignore[assignment]  # a Counter of floats
        part_parameters[module.part] += module.parameters
        types[own.dtype, own.label] += module.parameters
    ((dtype, label), _), *_ = types.most_common(1)
    return StoredWeights(
        dtype=dtype,
        label=label,
        bytes_by_part={
            part: part_bytes[part] / part_parameters[part] if part_parameters[part] else 2.0
            for part in Part
        },
    )


def _modules(shape: ModelShape, renames: Mapping[str, str]) -> Iterator[tuple[str, Module]]:
    """All matrices by their full names, without the prefix of the model."""
    yield "embed_tokens", Module("embed_tokens", Part.EMBEDDING, shape.vocab, shape.hidden)
    yield _OUTPUT, Module(_OUTPUT, Part.OUTPUT, shape.hidden, shape.vocab)
    for position, module in shape.modules():
        own = next((old for old in renames if module.name.startswith(old)), None)
        name = module.name if own is None else renames[own] + module.name.removeprefix(own)
        yield f"layers.{position}.{name}", module


_TORCH_DTYPES: Mapping[str, Dtype] = {
    "float32": Dtype.BF16,
    "float": Dtype.BF16,
    "bfloat16": Dtype.BF16,
    "float16": Dtype.FP16,
    "half": Dtype.FP16,
}


def _torch_dtype(keys: ConfigKeys) -> Dtype:
    """That in which vLLM keeps weights without a quantization: it narrows 32 bits to 16.

    Source: `_resolve_auto_dtype` of vLLM 0.32's `config/model.py`.
    """
    name = keys.value("torch_dtype") or keys.value("dtype") or "bfloat16"
    dtype = _TORCH_DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise UnknownModel(
            f"torch_dtype: got {name!r}, expected one of {', '.join(_TORCH_DTYPES)}", _REMEDY
        )
    return dtype
