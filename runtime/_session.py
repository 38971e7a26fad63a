"""The session: one artifact opened on one device, with its state held there.

The state and the accumulators have two sets of buffers. A step reads one and writes the other, and only a step that
succeeded swaps them: a failed step leaves the state as it was, and the last step can be taken back.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from fixstep.runtime._artifact import Artifact
from fixstep.runtime._device import Device, Module, View
from fixstep.runtime._metrics import Averages, Metric, Metrics
from fixstep.runtime._prepared import Fitted, PreparedBatch, Taken, copied
from fixstep.runtime._signature import Array, LeafSpec, check
from fixstep.runtime._sizes import SIZE
from fixstep.targets.errors import CheckpointError, TemplateError

Averaged = Literal["step", "evaluate"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The target that a session runs on.

    Attributes:
        target: its text, `cpu:host`.
        device: what the driver calls the device.
        passed_over: why each target that was tried before it was not taken.
    """

    target: str
    device: str
    passed_over: tuple[str, ...]


class Session:
    """One artifact on one device. Made by `load`; not for use by several threads at once."""

    def __init__(
        self, artifact: Artifact, choice: Choice, device: Device, module: Module, *, seed: int, state: Any | None
    ) -> None:
        self.artifact = artifact
        self.choice = choice
        self.steps = 0
        self._device = device
        self._module = module
        self._state_specs = artifact.signature("step", "state")
        self._batch_specs = artifact.signature("step", "batch")
        self._metric_specs = {name: artifact.signature(name, "metrics") for name in self._averaged()}
        self._averages = {name: Averages(device, artifact.signature(name, "accumulators")) for name in self._averaged()}
        self._current: list[View] = []
        self._other: list[View] = [device.empty(spec) for spec in self._state_specs]
        self._can_roll_back = False
        self._sizes = artifact.sizes
        self._batch_views: dict[int | None, list[View]] = {}
        self._packs: dict[tuple[Any, ...], tuple[Any, tuple[list[View], ...]]] = {}
        self._begin(seed, state)

    def __del__(self) -> None:
        # Buffers and modules that outlive their device would crash the process, so the device goes last. A traceback
        # that holds a buffer holds the session too.
        attributes = vars(self)
        device = attributes.pop("_device", None)
        attributes.clear()
        if device is not None:
            device.close()

    @property
    def functions(self) -> frozenset[str]:
        """The compiled functions: `step`, and those of `init`, `evaluate`, `predict` that the program has."""
        return frozenset(self.artifact.manifest["functions"])

    def signature(self, function: str) -> tuple[LeafSpec, ...]:
        """What a function takes beside the state: the leaves of its batch or inputs."""
        self._require(function)
        return self.artifact.signature(function, "inputs" if function == "predict" else "batch")

    def step(self, batch: Any) -> Metrics:
        """Train on one batch.

        Args:
            batch: nested containers of arrays, or a mapping from leaf path to array. Arrays are numpy's, or offer
                `__dlpack__` or `__array__`; they are copied, so the caller may reuse them at once.

        Returns:
            The metrics by name; `float(metrics["loss"])` is what waits for the device.

        Raises:
            TemplateError: if the batch does not fit the template; the device saw nothing of it.
            DeviceError: if the device failed; the state is as it was.
        """
        taken = self._batch(batch)
        averages = self._averages["step"]
        storage = (self._other, averages.other)
        results = self._call("step", taken, self._current, averages.current, taken.views, *storage)
        self._current, self._other = self._other, self._current
        averages.swap()
        self.steps += 1
        self._can_roll_back = True
        return self._metrics("step", taken, results)

    def prepare(self, batch: Any) -> PreparedBatch:
        """Check and copy a batch, and hand it to a GPU; `step` and `evaluate` of this session then take it at once.

        May be called in another thread while a step runs, so that what a batch costs the host and the way to the device
        take their time beside the step.

        Args:
            batch: as for `step`; the copy leaves its memory to the caller.

        Raises:
            TemplateError: as `step`.
            DeviceError: if the device has no room for it.
        """
        if isinstance(batch, PreparedBatch):
            return batch
        arrays = copied(batch)
        fitted = self._fitted(arrays, "batch", self._batch_specs)
        # What lies in the host's memory is copied into the buffer of the batch before it, when that is done with.
        views = None if self._device.writes_in_place else self._upload(*self._arguments(fitted))
        return PreparedBatch(self._device, arrays, fitted, views)

    def rollback(self) -> None:
        """Take the last step back: the state, the averages and the count are those before it.

        Raises:
            RuntimeError: if there is no step to take back: none was taken, or the state was set since.
        """
        if not self._can_roll_back:
            raise RuntimeError("there is no step to take back: only the last step can be, and only once")
        self._current, self._other = self._other, self._current
        self._averages["step"].swap()
        self.steps -= 1
        self._can_roll_back = False

    def evaluate(self, batch: Any) -> Metrics:
        """The metrics of a batch under the present state, which stays as it is.

        Raises:
            TemplateError: as `step`, or if the program has no `evaluate`.
            DeviceError: if the device failed.
        """
        self._require("evaluate")
        taken = self._batch(batch)
        averages = self._averages["evaluate"]
        results = self._call("evaluate", taken, self._current, averages.current, taken.views, averages.other)
        averages.swap()
        return self._metrics("evaluate", taken, results)

    def predict(self, inputs: Any) -> dict[str, Array]:
        """The outputs of the program's `predict`, by leaf path; a single array is `output`.

        Raises:
            TemplateError: as `step`, or if the program has no `predict`.
            DeviceError: if the device failed.
        """
        specs = self.signature("predict")
        outputs = self.artifact.signature("predict", "outputs")
        arrays, size, padded = self._fitted(inputs, "inputs", specs)
        views = self._upload(arrays, self._specs("inputs", specs, padded))
        if size is not None:
            views.append(self._device.upload(np.asarray(size, np.int32), SIZE))
        name = self._compiled("predict", padded)
        results = self._module.invoke(name, self._module.pack(self._current, views), wanted=len(outputs))
        whole = zip(self._specs("outputs", outputs, padded), results, strict=True)
        arrays_of = {s.path: self._device.download(v, s) for s, v in whole}
        return {
            path or "output": array[real] if (real := self._real("outputs", path, size)) else array
            for path, array in arrays_of.items()
        }

    def averages(self, function: Averaged = "step") -> dict[str, float]:
        """The mean of each scalar metric over the calls since the last reset; empty if there were none.

        A metric that the program gives as sums is read from them: a ratio of sums, or a total.
        """
        self._require(function)
        return self._averages[function].means()

    def totals(self, function: Averaged = "step") -> dict[str, Array]:
        """The metrics that are added up over the calls since the last reset (counts, confusion matrices), by name.

        Returns:
            Arrays; those of integers are int64.
        """
        self._require(function)
        return self._averages[function].totals()

    def reset_averages(self, function: Averaged = "step") -> None:
        """Begin the averages anew. A step taken before it can no longer be taken back."""
        self._require(function)
        self._averages[function].reset()
        self._packs.clear()
        if function == "step":
            self._can_roll_back = False

    def state(self) -> dict[str, Array]:
        """A host copy of the state by leaf path, in template order."""
        return {
            spec.path: self._device.download(view, spec)
            for spec, view in zip(self._state_specs, self._current, strict=True)
        }

    def load_state(self, state: Any) -> None:
        """Replace the whole state by host arrays; all of it or, on an error, nothing.

        Raises:
            TemplateError: listing every leaf that does not fit.
        """
        arrays = check(state, self._state_specs, "state")
        self._current = self._upload(arrays, self._state_specs)
        self._packs.clear()
        self._can_roll_back = False

    def save(self, path: str | os.PathLike[str], *, position: Mapping[str, Any] | None = None) -> None:
        """Write the state, the averages and the count of steps to a checkpoint; the old file stays until the end.

        Args:
            path: a file; its folder exists.
            position: what the caller wants back from `restore`, as JSON.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        from fixstep.runtime._checkpoint import write_checkpoint  # a process that only steps starts sooner without it

        write_checkpoint(
            path,
            self.state(),
            program=self.artifact.manifest["program"],
            template=self._state_specs,
            steps=self.steps,
            position={
                "caller": dict(position or {}),
                "averages": {name: averages.dump() for name, averages in self._averages.items()},
            },
        )

    def restore(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Take up the state, averages and count of a checkpoint of this program; all of it or, on an error, nothing.

        Returns:
            The position that was given to `save`.

        Raises:
            CheckpointError: if the file is damaged, or belongs to another program: then with each leaf that differs.
        """
        from fixstep.runtime._checkpoint import explain_mismatch, read_checkpoint  # as in `save`

        saved = read_checkpoint(path)
        if saved.program != self.artifact.manifest["program"]:
            difference = explain_mismatch(self._state_specs, saved.template)
            raise CheckpointError(
                f"{os.fspath(path)} belongs to another program than {self.artifact.manifest['name']}: "
                f"expected digest {self.artifact.manifest['program'][:12]}, got {saved.program[:12]}\n{difference}\n"
                "Use the artifact that wrote it, or take over what fits with load_leaves(session, path, strict=False)."
            )
        try:
            arrays = check(dict(saved.leaves), self._state_specs, "state")
        except TemplateError as exc:
            raise CheckpointError(f"{os.fspath(path)}: {exc}") from exc
        views = self._upload(arrays, self._state_specs)
        sums = saved.position.get("averages", {})
        restored = {name: averages.views_of(sums.get(name, {})) for name, averages in self._averages.items()}
        self._current = views
        self._packs.clear()
        for name, averages in self._averages.items():
            averages.current = restored[name]
        self.steps = saved.steps
        self._can_roll_back = False
        return dict(saved.position.get("caller", {}))

    def _averaged(self) -> list[Averaged]:
        names: tuple[Averaged, ...] = ("step", "evaluate")
        return [name for name in names if name in self.functions]

    def _require(self, function: str) -> None:
        if function not in self.functions:
            raise TemplateError(
                f"{self.artifact.manifest['name']} has no function {function!r}; it has "
                f"{', '.join(sorted(self.functions))}. Give the Program one (Program(..., {function}=...)) "
                "and compile it again."
            )

    def _upload(self, arrays: list[Array], specs: tuple[LeafSpec, ...]) -> list[View]:
        return [self._device.upload(array, spec) for array, spec in zip(arrays, specs, strict=True)]

    def _batch(self, batch: Any) -> Taken:
        """The batch on the device, in the buffers of the last one of its size where the device allows it."""
        if not isinstance(batch, PreparedBatch):
            fitted = self._fitted(batch, "batch", self._batch_specs)
        elif not batch.is_for(self._device):
            raise TemplateError("batch: another session prepared it: let this one prepare it, or pass the arrays")
        elif batch.taken is not None:
            return batch.taken
        else:
            fitted = batch.fitted
        arrays, specs = self._arguments(fitted)
        views = self._batch_views.get(fitted.padded)
        if self._device.writes_in_place and views is not None:
            for view, array, spec in zip(views, arrays, specs, strict=True):
                self._device.write(view, array, spec)
        else:
            views = self._batch_views[fitted.padded] = self._upload(arrays, specs)
        return Taken(views, fitted.size, fitted.padded)

    def _arguments(self, fitted: Fitted) -> tuple[list[Array], tuple[LeafSpec, ...]]:
        """What a function takes of a batch: its leaves and, where it may have any size, that."""
        specs = self._specs("batch", self._batch_specs, fitted.padded)
        if fitted.size is None:
            return fitted.arrays, specs
        return [*fitted.arrays, np.asarray(fitted.size, np.int32)], (*specs, SIZE)

    def _fitted(self, tree: Any, role: str, specs: tuple[LeafSpec, ...]) -> Fitted:
        """The checked leaves of a batch or inputs; where any size goes, padded to the next one."""
        if self._sizes is None:
            return Fitted(check(tree, specs, role), None, None)
        arrays, size = self._sizes.fit(tree, role, specs)
        padded = self._sizes.padded(size)
        return Fitted(self._sizes.pad(arrays, role, specs, padded), size, padded)

    def _specs(self, role: str, specs: tuple[LeafSpec, ...], padded: int | None) -> tuple[LeafSpec, ...]:
        return specs if self._sizes is None or padded is None else self._sizes.specs(role, specs, padded)

    def _compiled(self, function: str, padded: int | None) -> str:
        """The name of the compiled function for a padded size."""
        return function if self._sizes is None or padded is None else self._sizes.function(function, padded)

    def _real(self, role: str, path: str, size: int | None) -> tuple[slice, ...]:
        """The part of a result that is no padding."""
        return () if self._sizes is None or size is None else self._sizes.real(role, path, size)

    def _call(self, function: Averaged, taken: Taken, *groups: list[View]) -> list[View]:
        """Call a function; its arguments are packed once for each set of buffers, where the device allows it."""
        wanted = len(self._metric_specs[function])
        name = self._compiled(function, taken.padded)
        if not self._device.writes_in_place:
            return self._module.invoke(name, self._module.pack(*groups), wanted=wanted)
        key = (name, *map(id, groups))
        if key not in self._packs:
            # Beside the pack the groups themselves, so that no other list gets their identity.
            self._packs[key] = (self._module.pack(*groups), groups)
        return self._module.invoke(name, self._packs[key][0], wanted=wanted)

    def _metrics(self, function: Averaged, taken: Taken, results: list[View]) -> Metrics:
        role = "metrics" if function == "step" else "evaluation"
        specs = self._specs(role, self._metric_specs[function], taken.padded)
        return Metrics(
            {
                s.path: Metric(self._device, view, s, self._real(role, s.path, taken.size))
                for s, view in zip(specs, results, strict=True)
            }
        )

    def _begin(self, seed: int, state: Any | None) -> None:
        """Make the first state: the given one, the artifact's own, or what `init` makes of the seed."""
        if state is not None:
            self.load_state(state)
        elif "init" in self.functions:
            words = [np.uint32(seed >> 32), np.uint32(seed & 0xFFFFFFFF)]
            specs = self.artifact.signature("init", "seed")
            # Into buffers of ours: results that IREE allocates may share storage, and the state is written in place.
            storage = [self._device.empty(spec) for spec in self._state_specs]
            seed_words = self._upload([np.asarray(word) for word in words], specs)
            self._module.invoke("init", self._module.pack(seed_words, storage), wanted=0)
            self._current = storage
        else:
            self.load_state(self.artifact.initial_state())
