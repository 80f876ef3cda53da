"""Grids that are fitted to measured kernel times, and how they are stored."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_STEPS_PER_OCTAVE = 32
"""Values are stored as whole steps of a 32nd of an octave over a nanosecond, and
each as its difference from the value before it."""
_SMOOTHNESS = 1e-3
"""Weight of a grid's bends: it decides only where no row is near."""
_HELD_BACK = 10


class Points(NamedTuple):
    """Measured kernels: their sizes and seconds."""

    sizes: list[tuple[float, ...]]
    seconds: list[float]
    wholes_s: list[float] | None = None
    """What contains these seconds, of which errors are shares; None: the seconds themselves."""


Axes = Sequence[Sequence[int]]


Grid = Mapping[str, Any]


def fit_grid(points: Points, axes: Axes, *, rising: int, at_most: Grid | None) -> dict[str, object]:
    """A grid whose multilinear interpolation of logarithms is nearest to the points.

    Seconds never fall along the first `rising` axes, and are nowhere more than those of `at_most`.
    """
    logs = np.log2(np.asarray(points.sizes, dtype=float))
    seconds = np.asarray(points.seconds)
    wholes_s = seconds if points.wholes_s is None else np.asarray(points.wholes_s)
    keys = [(*sizes, whole_s) for sizes, whole_s in zip(points.sizes, wholes_s, strict=True)]
    names = map(repr, points.sizes if points.wholes_s is None else keys)
    is_held_back = np.array([zlib.crc32(name.encode()) % _HELD_BACK == 0 for name in names])
    log_axes = [np.log2(axis) for axis in axes]
    corners, weights = _interpolation(logs, log_axes)
    fitted, shape = ~is_held_back, [len(axis) for axis in axes]
    values = _solve(corners[fitted], weights[fitted], np.log2(seconds[fitted]), shape)
    values = _cap_by_larger(values.reshape(shape), rising).ravel()
    if at_most is not None and at_most["axes"] == [list(axis) for axis in axes]:
        values = np.minimum(values, decode(at_most["values"]))
    off_s = np.abs(2 ** (values[corners] * weights).sum(axis=1) - seconds)
    return {
        "axes": [list(axis) for axis in axes],
        "values": encode(values),
        "rows": len(seconds),
        "held_back_mape": round(float((off_s / wholes_s)[is_held_back].mean()), 4),
    }


def _cap_by_larger(grid: np.ndarray[Any, Any], axes: int) -> np.ndarray[Any, Any]:
    """Never more than at larger sizes of the first axes: an engine can pad its work."""
    for axis in range(axes):
        grid = np.flip(np.minimum.accumulate(np.flip(grid, axis), axis=axis), axis)
    return grid


def _interpolation(
    logs: np.ndarray[Any, Any], axes: Sequence[np.ndarray[Any, Any]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of each point, the flat indices and weights of its cell's corners."""
    corners = np.zeros((len(logs), 1), dtype=int)
    weights = np.ones((len(logs), 1))
    for number, axis in enumerate(axes):
        x = np.clip(logs[:, number], axis[0], axis[-1])
        low = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
        share = ((x - axis[low]) / (axis[low + 1] - axis[low]))[:, None]
        corners = corners * len(axis) + low[:, None]
        corners = np.hstack([corners, corners + 1])
        weights = np.hstack([weights * (1 - share), weights * share])
    return corners, weights


def _solve(
    corners: np.ndarray[Any, Any],
    weights: np.ndarray[Any, Any],
    targets: np.ndarray[Any, Any],
    sizes: Sequence[int],
) -> np.ndarray[Any, Any]:
    count = int(np.prod(sizes))
    normal, right = np.zeros((count, count)), np.zeros(count)
    for column in range(corners.shape[1]):
        np.add.at(right, corners[:, column], weights[:, column] * targets)
        for other in range(corners.shape[1]):
            products = weights[:, column] * weights[:, other]
            np.add.at(normal, (corners[:, column], corners[:, other]), products)
    indices = np.arange(count).reshape(sizes)
    for number, size in enumerate(sizes):
        along = np.moveaxis(indices, number, 0)
        for middle in range(1, size - 1):
            triples = [along[middle - 1].ravel(), along[middle].ravel(), along[middle + 1].ravel()]
            for first, a in zip(triples, (1, -2, 1), strict=True):
                for second, b in zip(triples, (1, -2, 1), strict=True):
                    np.add.at(normal, (first, second), _SMOOTHNESS * a * b)
    normal += 1e-9 * np.eye(count)
    solution: np.ndarray[Any, Any] = np.linalg.solve(normal, right)
    return solution


def encode(values: np.ndarray[Any, Any]) -> str:
    """Base64 of deflated little-endian 16-bit numbers; see `_STEPS_PER_OCTAVE`."""
    steps = np.round((values - np.log2(1e-9)) * _STEPS_PER_OCTAVE)
    differences = np.diff(steps, prepend=0.0).astype("<i2")
    return base64.b64encode(zlib.compress(differences.tobytes(), 9)).decode()


def decode(text: str) -> np.ndarray[Any, Any]:
    """The values that `encode` stored."""
    differences = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<i2")
    steps = np.cumsum(differences, dtype=np.int64)
    values: np.ndarray[Any, Any] = np.log2(1e-9) + steps / _STEPS_PER_OCTAVE
    return values
