"""What a call gives to look at: metrics that stay on the device until they are read, and their running averages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fixstep.runtime._device import Device, View
from fixstep.runtime._signature import Array, LeafSpec
from fixstep.targets.errors import CheckpointError


class Metric:
    """A metric of one step, still on the device; reading it waits for the device."""

    __slots__ = ("_device", "_real", "_spec", "_value", "_view")

    def __init__(self, device: Device, view: View, spec: LeafSpec, real: tuple[slice, ...] = ()) -> None:
        """Hold a result of a call; `real` leaves out the padding of a batch that was filled up."""
        device.lend()
        self._device = device
        self._view = view
        self._spec = spec
        self._real = real
        self._value: Array | None = None

    def numpy(self) -> Array:
        """The value as an array of the metric's dtype and shape."""
        if self._value is None:
            whole = self._device.download(self._view, self._spec)
            self._value = whole[self._real] if self._real else whole
            self._give_up()
        return self._value

    def _give_up(self) -> None:
        self._view = None
        self._device.take_back()

    def __del__(self) -> None:
        if self._view is not None:  # before the device, which closes with the last buffer
            self._give_up()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype=dtype, copy=True if copy is None else copy)

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __format__(self, spec: str) -> str:
        return format(self.numpy()[()], spec)

    def __repr__(self) -> str:
        return f"Metric({self._spec.path!r}, {self.numpy()})"


class Metrics(Mapping[str, Metric]):
    """The metrics of one call, by name."""

    __slots__ = ("_metrics",)

    def __init__(self, metrics: dict[str, Metric]) -> None:
        self._metrics = metrics

    def __getitem__(self, name: str) -> Metric:
        try:
            return self._metrics[name]
        except KeyError:
            raise KeyError(f"no metric {name!r}; there are: {', '.join(self._metrics) or 'none'}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={metric.numpy()}' for name, metric in self._metrics.items())})"


class Averages:
    """The sums of one function's metrics since the last reset, on the device, in two sets of buffers."""

    def __init__(self, device: Device, specs: tuple[LeafSpec, ...]) -> None:
        self.specs = specs
        self._device = device
        self.current = self._zeros()
        self.other = self._zeros()

    def _zeros(self) -> list[View]:
        return [self._device.upload(np.zeros(spec.shape, spec.numpy_dtype), spec) for spec in self.specs]

    def swap(self) -> None:
        """Make the sums that the last call wrote the current ones, or take that back."""
        self.current, self.other = self.other, self.current

    def reset(self) -> None:
        """Begin anew."""
        self.current = self._zeros()

    def means(self) -> dict[str, float]:
        """What the sums say of each metric: a ratio, a mean over the calls, a total; empty where nothing was counted.

        The word that an accumulator's path begins with says how it is read: `sum` is divided by the `weight` of the
        same name, or by `count` where there is none; `logsum` likewise, and the exponential taken; `ratios` are divided
        each by its own `weight`, and the mean taken of those whose `counted` is not 0; `total` is itself.
        Totals that are no scalars are left to `totals`.
        """
        sums = self._sums()
        count = sums.pop("count")
        if not count:
            return {}
        means: dict[str, float] = {}
        for path, total in sums.items():
            word, _, name = path.partition("/")
            if word == "total" and np.ndim(total) == 0:
                means[name] = float(total)
            elif word in ("sum", "logsum"):
                mean = _quotient(total, sums.get(f"weight/{name}", count))
                means[name] = mean if word == "sum" else _exponential(mean)
            elif word == "ratios":
                means[name] = _mean_ratio(total, sums[f"weight/{name}"], sums[f"counted/{name}"])
        return means

    def totals(self) -> dict[str, Any]:
        """The metrics that are added up, by name: arrays, integers in int64."""
        return {
            path.partition("/")[2]: total for path, total in self._sums().items() if path.partition("/")[0] == "total"
        }

    def _sums(self) -> dict[str, Any]:
        """Each sum by path, and `count`; integers, which the device adds up in two words, as int64."""
        values = {}
        for spec, view in zip(self.specs, self.current, strict=True):
            value = self._device.download(view, spec)
            words = spec.dtype == "uint32" and spec.shape[-1:] == (2,)
            values[spec.path] = _joined(value) if words else value
        return values

    def dump(self) -> dict[str, str]:
        """The sums, exactly, as text."""
        return {
            spec.path: self._device.download(view, spec).tobytes().hex()
            for spec, view in zip(self.specs, self.current, strict=True)
        }

    def views_of(self, sums: Mapping[str, str]) -> list[View]:
        """Buffers that hold what `dump` gave."""
        if set(sums) != {spec.path for spec in self.specs}:
            raise CheckpointError("the checkpoint's running averages are those of another program")
        try:
            arrays = [np.frombuffer(bytes.fromhex(sums[s.path]), s.numpy_dtype).reshape(s.shape) for s in self.specs]
        except ValueError as exc:
            raise CheckpointError(f"the checkpoint's running averages are damaged: {exc}") from exc
        return [self._device.upload(array, s) for array, s in zip(arrays, self.specs, strict=True)]


def _joined(words: Array) -> Array:
    """Integers of their low and high 32 bits, in two's complement."""
    wide = words.astype(np.uint64)
    return np.asarray(wide[..., 0] | wide[..., 1] << np.uint64(32)).view(np.int64)


def _quotient(total: Any, weight: Any) -> float:
    # In Python's numbers: integers beyond 2^53 divide exactly, and 0 / 0 is no warning.
    divisor = weight.item()
    return total.item() / divisor if divisor else math.nan


def _mean_ratio(totals: Array, weights: Array, counted: Array) -> float:
    pairs = zip(totals[counted != 0], weights[counted != 0], strict=True)
    ratios = [_quotient(total, weight) if weight else 0.0 for total, weight in pairs]
    return sum(ratios) / len(ratios) if ratios else math.nan


def _exponential(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
