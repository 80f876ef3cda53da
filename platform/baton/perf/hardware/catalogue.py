"""Accelerators by the names that people, clouds and drivers give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType

from baton.domain.errors import UnknownAccelerator
from baton.perf.hardware.accelerators import Accelerator
from baton.perf.hardware.data_sheets import CATALOGUE

_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "a100": "a100_sxm",
        "a10080gb": "a100_sxm",
        "a10080g": "a100_sxm",
        "a100sxm80gb": "a100_sxm",
        "a10040g": "a100_40gb",
        "a100sxm40gb": "a100_40gb",
        "a800": "a800_sxm",
        "h100": "h100_sxm",
        "h10080gb": "h100_sxm",
        "h10080g": "h100_sxm",
        "h10080gbhbm3": "h100_sxm",
        "h800": "h800_sxm",
        "h20": "h20_sxm",
        "h200": "h200_sxm",
        "b200": "b200_sxm",
        "b300": "b300_sxm",
        "gb200sxm": "gb200",
        "gb200nvl72": "gb200",
        "gb300sxm": "gb300",
        "gb300nvl72": "gb300",
        "gh20096gb": "gh200",
        "gh200480gb": "gh200",
        "5090": "rtx_5090",
        "geforcertx5090": "rtx_5090",
        "rtx4090": "rtx_4090",
        "geforcertx4090": "rtx_4090",
        "4090": "rtx_4090",
        "rtx6000pro": "rtx_pro_6000",
        "rtxpro6000blackwell": "rtx_pro_6000",
        "instinctmi300x": "mi300x",
        "instinctmi325x": "mi325x",
        "instinctmi355x": "mi355x",
    }
)


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of that name, as it is called here, by vendors, clouds or drivers.

    Case, blanks, dashes and the vendor do not matter: `H100`, `h100_sxm` and what drivers say,
    `NVIDIA H100 80GB HBM3`, are the same.

    Raises:
        UnknownAccelerator: it is in none of the data sheets here.
    """
    match = _BY_NORMALIZED_NAME.get(_normalize_name(name))
    if match is None:
        similar = get_close_matches(_normalize_name(name), _BY_NORMALIZED_NAME, n=3, cutoff=0.5)
        suggestions = list(
            dict.fromkeys(_BY_NORMALIZED_NAME[similar_name].name for similar_name in similar)
        ) or [*CATALOGUE]
        raise UnknownAccelerator(
            f"there is no accelerator {name!r} in the catalogue", f"try {', '.join(suggestions)}"
        )
    return match


def _normalize_name(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|amd|intel)|(server|workstation).*$", "", plain).replace("sxm4", "sxm")


_BY_NORMALIZED_NAME: Mapping[str, Accelerator] = MappingProxyType(
    {_normalize_name(name): accelerator for name, accelerator in CATALOGUE.items()}
    | {alias: CATALOGUE[name] for alias, name in _ALIASES.items()}
)
