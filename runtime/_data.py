"""Data for the loop: arrays in memory or in a .npz file, data sets, a user's own function, any iterable of batches.

An epoch's batches are asked for by the number of the epoch (from 1) and the number of batches to leave out at its
start, so that a resumed run sees exactly the batches that the stopped one had not seen.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fixstep.runtime._npz import load_npz
from fixstep.runtime._order import Order
from fixstep.runtime._signature import Array, as_array, describe, flatten, shown_path
from fixstep.runtime._user_code import blame, import_callable
from fixstep.targets.errors import DataError, FixstepError

__all__ = [
    "ArrayData",
    "DatasetData",
    "FunctionData",
    "IterableData",
    "Source",
    "StreamData",
    "as_source",
    "load_npz",
    "load_source",
]


class Source(Protocol):
    """What the loop asks for batches. Only `batches` is needed; the loop reads the others where they exist.

    What else a source may have:
        batches_per_epoch: how many batches an epoch has (int), for the progress bar.
        left_out: how many examples an epoch leaves out (int).
        identity: what the order of the batches depends on (a JSON mapping); kept in checkpoints, compared on resume.
        seek(iteration): called when a run is resumed after so many batches, by a source that has no epochs.
        give_back(batches): takes batches that were asked for and not used, in their order.
        order_is_its_own: whether nothing is known of the order in later epochs; said when a run is resumed.
    """

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch (from 1), without the first `start` ones."""
        ...


class _OrderedData:
    """What sources have in common whose examples are picked by number."""

    def __init__(self, order: Order) -> None:
        self.order = order

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one epoch."""
        return self.order.batches_per_epoch

    @property
    def left_out(self) -> int:
        """Examples that an epoch leaves out, because they do not fill a batch."""
        return self.order.left_out

    @property
    def identity(self) -> dict[str, Any]:
        """What the batches' order depends on."""
        return self.order.identity


class ArrayData(_OrderedData):
    """Batches cut from arrays that share their first axis, the examples.

    The order is a pure function of the seed and the epoch, the same on every machine. Without shuffling, batches are
    views of the arrays; with it, copies.

    Args:
        arrays: a mapping from leaf path to array, or nested containers of arrays, each of shape (examples, ...).
        batch_size: examples a batch.
        shuffle: whether each epoch has its own random order.
        seed: of the order; not negative.
        drop_last: whether a short last batch is left out. Most compiled steps have one size, so it is by default;
            `left_out` says how many examples that costs each epoch (with shuffling, others each time).

    Raises:
        DataError: if there are no arrays, their lengths differ, one has no axis or holds Python objects, or they do not
            fill one batch.
    """

    def __init__(
        self, arrays: Any, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True
    ) -> None:
        self.arrays = _checked_arrays(arrays)
        examples = len(next(iter(self.arrays.values())))
        super().__init__(Order(examples, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last))

    def batches(self, epoch: int, start: int = 0) -> Iterator[dict[str, Array]]:
        """The batches of an epoch, without the first `start` ones (which cost nothing)."""
        for picked in self.order.batches(epoch, start):
            yield {path: array[picked] for path, array in self.arrays.items()}


def _checked_arrays(tree: Any) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    wrong: list[str] = []
    for path, value in flatten(tree).items():
        array = as_array(value)
        if isinstance(array, str):
            wrong.append(f"  {shown_path(path, 'data')}: expected an array, got {array}")
        elif array.ndim == 0:
            wrong.append(f"  {shown_path(path, 'data')}: expected a first axis of examples, got {_shown(array)}")
        else:
            arrays[path] = array
    if wrong:
        raise DataError("\n".join(["the data cannot be cut into batches:", *wrong]))
    if not arrays:
        raise DataError("the data holds no arrays: pass at least one, by leaf path")
    if len({len(array) for array in arrays.values()}) > 1:
        lines = [
            f"  {shown_path(path, 'data')}: {len(array)} examples, {_shown(array)}" for path, array in arrays.items()
        ]
        raise DataError("\n".join(["the arrays differ in their number of examples (the first axis):", *lines]))
    return arrays


def _shown(array: Array) -> str:
    return describe(array.dtype.name, array.shape)


class FunctionData:
    """Batches from a user's function, called once an epoch.

    The function returns an iterable of batches. It is given the epoch's number (from 1) if it has a parameter `epoch`
    or a first one without a default, and the number of batches to leave out if it has a parameter `start`; otherwise
    they are made and dropped.

    Args:
        function: the function.
        name: how messages call it.
    """

    def __init__(self, function: Callable[..., Iterable[Any]], name: str) -> None:
        self.function = function
        self.name = name
        parameters = inspect.signature(function).parameters
        first = next(iter(parameters.values()), None)
        self._takes_start = "start" in parameters
        self._epoch_by_name = "epoch" in parameters
        self._epoch_first = (
            not self._epoch_by_name
            and first is not None
            and first.name != "start"
            and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
            and first.default is first.empty
        )

    @property
    def identity(self) -> dict[str, Any]:
        """The function's name: a checkpoint's cursor counts its batches."""
        return {"source": self.name}

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch, without the first `start` ones."""
        try:
            batches = self._call(epoch, start)
            if not isinstance(batches, Iterable):
                raise DataError(
                    f"{self.name} returned a {type(batches).__name__}, expected an iterable of batches; "
                    "write it as a generator, or return a list"
                )
            yield from batches if self._takes_start else _skip(iter(batches), start, self.name)
        except FixstepError:
            raise
        except Exception as exc:
            raise DataError(f"{self.name} failed in epoch {epoch}: {blame(exc)}") from exc

    def _call(self, epoch: int, start: int) -> Any:
        named = {"epoch": epoch} if self._epoch_by_name else {}
        if self._takes_start:
            named["start"] = start
        return self.function(epoch, **named) if self._epoch_first else self.function(**named)


class DatasetData(_OrderedData):
    """Batches from a data set that gives examples by number: `dataset[indices]` is a mapping from column to array.

    A `datasets.Dataset` of Hugging Face is one, with `dataset.with_format("numpy")`. The order is that of `ArrayData`.

    Args:
        dataset: has `len` and takes a list of indices; columns are leaf paths.
        batch_size: examples a batch.
        shuffle: whether each epoch has its own random order.
        seed: of the order; not negative.
        drop_last: whether a short last batch is left out.

    Raises:
        DataError: if it is no such data set, or does not fill one batch.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True
    ) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"the data set is a {type(dataset).__name__} without a length or without examples by number: "
                "pass the loop an iterable of batches instead, such as dataset.iter(batch_size=...) in a function"
            )
        self.dataset = dataset
        super().__init__(Order(len(dataset), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch, without the first `start` ones (which cost nothing)."""
        for picked in self.order.batches(epoch, start):
            indices = range(picked.start, picked.stop) if isinstance(picked, slice) else picked.tolist()
            try:
                batch = self.dataset[list(indices)]
            except (TypeError, KeyError) as exc:
                raise DataError(
                    f"the data set takes no list of indices ({exc}): use a loader that makes batches of it"
                ) from exc
            if not isinstance(batch, Mapping):
                raise DataError(
                    f"dataset[indices] is a {type(batch).__name__}, expected a mapping from column to array: "
                    "use a loader that makes batches of it, or ArrayData"
                )
            yield dict(batch)


class IterableData:
    """Batches from an iterable that can be gone through again: a list, a DataLoader of PyTorch, a loader or data set of
    Grain, a `tf.data.Dataset`, anything with `__iter__`.

    Where it, its `sampler` or its `batch_sampler` has `set_epoch`, that is called with the epoch's number from 0, so
    that the order follows from the epoch.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable
        places: list[Any] = [iterable, *(getattr(iterable, name, None) for name in ("sampler", "batch_sampler"))]
        self._set_epoch = [place.set_epoch for place in places if callable(getattr(place, "set_epoch", None))]

    @property
    def batches_per_epoch(self) -> int | None:
        """The iterable's length, where it has one."""
        try:
            return len(self.iterable)  # type: ignore[arg-type]
        except TypeError:
            return None

    @property
    def order_is_its_own(self) -> bool:
        """Whether a later epoch may have another order in a process that has not gone through the earlier ones."""
        return not self._set_epoch and not isinstance(self.iterable, Sequence)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The iterable's batches, without the first `start` ones (which are made and dropped)."""
        for set_epoch in self._set_epoch:
            set_epoch(epoch - 1)
        return _skip(iter(self.iterable), start, "the data")


class StreamData:
    """Batches from an iterator, which can be gone through only once: each epoch goes on where the last one ended."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._ahead: collections.deque[Any] = collections.deque()

    def seek(self, iteration: int) -> None:
        """Make and drop the batches that a resumed run has had.

        Raises:
            DataError: if there are not so many.
        """
        skipped = sum(1 for _ in itertools.islice(self._iterator, iteration))
        if skipped < iteration:
            raise DataError(
                f"the data gave {skipped} batches, but the checkpoint stands after batch {iteration} of the run: "
                "an iterator must begin where the run began"
            )

    def give_back(self, batches: list[Any]) -> None:
        """Take batches that were not used; they come next."""
        self._ahead.extendleft(reversed(batches))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """What comes next; the iterator itself stays open when this is closed."""
        while True:
            if self._ahead:
                batch = self._ahead.popleft()
            else:
                try:
                    batch = next(self._iterator)
                except StopIteration:
                    return
            yield batch


def as_source(data: Any) -> Source:
    """What the loop was given, as a source.

    Raises:
        DataError: if it is neither a source nor an iterable.
    """
    if callable(getattr(data, "batches", None)):
        source: Source = data
        return source
    if isinstance(data, dict):
        raise DataError("the data is a dict of arrays, expected batches: pass ArrayData(arrays, batch_size)")
    if isinstance(data, str | os.PathLike):
        raise DataError(f"the data is the path {os.fspath(data)}: pass ArrayData(load_npz(path), batch_size)")
    if hasattr(data, "column_names") and callable(getattr(data, "with_format", None)) and hasattr(data, "__len__"):
        raise DataError(
            "the data is a data set of examples, expected batches: "
            'pass DatasetData(dataset.with_format("numpy"), batch_size)'
        )
    if isinstance(data, Iterator):
        return StreamData(data)
    if isinstance(data, Iterable):
        return IterableData(data)
    raise DataError(
        f"the data is a {type(data).__name__}, expected an iterable of batches, ArrayData, "
        "or an object with a method batches(epoch, start=0)"
    )


def no_batches(source: Source, epoch: int, name: str = "the data") -> DataError:
    """The error for an epoch without a single batch, which says why where that can be known."""
    if isinstance(source, FunctionData):
        name = source.name
    if epoch == 1 and not isinstance(source, StreamData):
        return DataError(f"{name} gave no batch: an epoch needs at least one")
    if isinstance(source, FunctionData):
        advice = "return a new iterator for each call, not one that earlier epochs used up"
    else:
        advice = (
            "an iterator or generator can be gone through only once; pass a list, ArrayData, "
            "or an object whose __iter__ starts anew, or say with iterations=... how many batches an epoch has"
        )
    return DataError(f"{name} gave no batch in epoch {epoch}: {advice}")


def _skip(batches: Iterator[Any], start: int, name: str) -> Iterator[Any]:
    skipped = sum(1 for _ in itertools.islice(batches, start))
    if skipped < start:
        raise DataError(
            f"{name} gave {skipped} batches, but the checkpoint stands after batch {start} of its epoch: "
            "resume with the data that the run was started with"
        )
    yield from batches


def load_source(name: str) -> FunctionData:
    """The data source that a `module:function` names; modules of the current directory are found too.

    Raises:
        DataError: if there is no such module or function, if it fails on import, or if it is not callable.
    """
    return FunctionData(import_callable(name, "data source", "function that returns batches"), name)
