"""The program: what a user hands over to be compiled, and how it is found by name."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fixstep.frontend._lines import describe_error
from fixstep.frontend._seed import flatten, is_python_number
from fixstep.frontend.sizes._range import SizeRange, size_range, sized
from fixstep.targets.errors import FixstepError, ProgramError

_CALLS = {
    "step": "step(state, batch) -> (state, metrics)",
    "evaluate": "evaluate(state, batch) -> metrics",
    "predict": "predict(state, inputs) -> outputs",
}


class Largest(NamedTuple):
    """The examples of a program in numbers: its batch, and what `predict` takes."""

    batch: Any
    inputs: Any


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """A training program: functions of a state and a batch, and an example of the batch.

    Attributes:
        init: `init(key) -> state` with a typed PRNG key, or the first state itself, any pytree.
        step: `step(state, batch) -> (state, metrics)`; metrics are a dict of scalars, maybe empty. A bare scalar is
            `{"loss": scalar}`; other pytrees of arrays are taken leaf by leaf.
        batch: an example of the batch, any pytree of arrays or `jax.ShapeDtypeStruct`; only types and shapes are used.
            One dimension may be symbolic (`jax.export.symbolic_shape("b", constraints=["b <= 64"])`): then batches of
            every size in its range train.
        evaluate: `evaluate(state, batch) -> metrics`, optional.
        predict: `predict(state, inputs) -> outputs`, optional.
        inputs: an example of what `predict` takes; needed with it, because it is not guessed from the batch.
        name: the name of the artifact; the name of its file where there is none.

    Raises:
        ProgramError: listing everything that is wrong with it.
    """

    init: Any
    step: Callable[[Any, Any], Any]
    batch: Any
    evaluate: Callable[[Any, Any], Any] | None = None
    predict: Callable[[Any, Any], Any] | None = None
    inputs: Any = None
    name: str | None = None

    def __post_init__(self) -> None:
        problems = [
            problem
            for problem in (
                _init_problem(self.init),
                _call_problem("step", self.step),
                _call_problem("evaluate", self.evaluate) if self.evaluate is not None else None,
                _call_problem("predict", self.predict) if self.predict is not None else None,
                *self._examples_problems(),
                _name_problem(self.name),
            )
            if problem
        ]
        if problems:
            raise ProgramError("\n".join(problems))

    def _examples_problems(self) -> list[str | None]:
        paired = None
        if self.predict is None and self.inputs is not None:
            paired = "inputs are given without predict: leave them out, or pass predict"
        if self.predict is not None and self.inputs is None:
            paired = "predict is given without inputs: pass an example of what it takes as inputs=..."
        try:
            largest = self.largest
        except ProgramError as exc:
            return [str(exc), paired]
        return [_tree_problem("batch", largest.batch), paired or _tree_problem("inputs", largest.inputs)]

    @property
    def sizes(self) -> SizeRange | None:
        """The sizes that a batch may have, or None where its shapes are numbers."""
        return size_range({"batch": self.batch, "inputs": self.inputs})

    @property
    def largest(self) -> Largest:
        """The examples at the largest size; as they are where their shapes are numbers."""
        sizes = self.sizes
        at = {sizes.symbol: sizes.high} if sizes else {}
        return Largest(sized(self.batch, at), sized(self.inputs, at))

    @property
    def init_is_function(self) -> bool:
        """Whether `init` makes the state, rather than being it (a callable pytree of arrays is a state)."""
        if not callable(self.init):
            return False
        return not any(is_python_number(leaf) or hasattr(leaf, "dtype") for leaf in jax.tree.leaves(self.init))


def _init_problem(init: Any) -> str | None:
    if callable(init) and jax.tree_util.all_leaves([init]):
        return _arity_problem("init", init, "init(key) -> state", (object(),))
    return None


def _call_problem(name: str, function: Any) -> str | None:
    if not callable(function):
        return f"{name}: expected a function {_CALLS[name]}, got {_describe(function)}"
    return _arity_problem(name, function, _CALLS[name], (object(), object()))


def _arity_problem(name: str, function: Any, call: str, arguments: tuple[Any, ...]) -> str | None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none: the trace will tell
        return None
    try:
        signature.bind(*arguments)
    except TypeError as exc:
        got = f"{getattr(function, '__name__', type(function).__name__)}{signature}"
        return f"{name}: expected a function {call}, got {got} ({exc})"
    return None


def _tree_problem(name: str, tree: Any) -> str | None:
    try:
        flatten(tree, name, numbers=False)
    except ProgramError as exc:
        return str(exc)
    return None


def _name_problem(name: Any) -> str | None:
    if name is None or (isinstance(name, str) and name and name.isprintable() and not set(name) & set('/\\:"')):
        return None
    return f"name: expected a plain text without / \\ : or quotes, got {name!r}"


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray | jax.Array):
        return f"an array {value.dtype}{list(value.shape)}"
    return f"{value!r:.80} of type {type(value).__name__}"


def import_program(reference: str) -> Program:
    """Import a program by name; modules in the current directory are found too.

    Args:
        reference: `module:attribute`, as in `examples.digits:program`. The attribute is a `Program`, or a function
            without arguments that returns one.

    Returns:
        The program; where it has no name of its own it takes the module's last word, here `digits`.

    Raises:
        ProgramError: if there is no such module or attribute (near names are shown), if importing it fails, or if
            what it holds is no program.
    """
    module_name, colon, attribute = reference.partition(":")
    if not colon or not module_name or not attribute:
        raise ProgramError(f"expected a program as module:attribute, as in examples.digits:program, got {reference!r}")
    value: Any = _import(module_name)
    for name in attribute.split("."):
        if not hasattr(value, name):
            near = _near(name, [n for n in dir(value) if not n.startswith("_")])
            raise ProgramError(f"{reference}: {module_name} has no attribute {name!r}{near}")
        value = getattr(value, name)
    program = _as_program(reference, value)
    return program if program.name else dataclasses.replace(program, name=module_name.rpartition(".")[2])


def _import(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except FixstepError:
        raise
    except ModuleNotFoundError as exc:
        missing = exc.name or ""
        if name == missing or name.startswith(missing + "."):
            raise ProgramError(f"no module {name!r}{_where_sought(name)}") from exc
        raise ProgramError(f"importing {name!r} failed: it needs {missing!r}, which is not installed") from exc
    except (Exception, SystemExit) as exc:
        raise ProgramError(f"importing {name!r} failed: {describe_error(exc)}") from exc


def _where_sought(name: str) -> str:
    """Where the module was looked for; what to do where another package of that name hides the folder here."""
    package = name.partition(".")[0]
    folder = Path.cwd() / package
    found = getattr(sys.modules.get(package), "__file__", None)
    if found and folder.is_dir() and not Path(found).is_relative_to(folder):
        return f": {package!r} is {found}, not the folder {folder}; rename the folder, or give it an __init__.py"
    return f" in {Path.cwd()} or on Python's path{_near(name, _modules_beside(name))}"


def _modules_beside(name: str) -> Iterable[str]:
    """The modules that stand where `name` would: in its parent package, else in the current directory."""
    parent, _, _ = name.rpartition(".")
    folder = Path.cwd().joinpath(*parent.split(".")) if parent else Path.cwd()
    return [f"{parent}.{m.name}" if parent else m.name for m in pkgutil.iter_modules([str(folder)])]


def _near(name: str, candidates: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(candidates), n=3)
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def _as_program(reference: str, value: Any) -> Program:
    if isinstance(value, Program):
        return value
    if not callable(value):
        raise ProgramError(f"{reference}: expected a Program, or a function that returns one, got {_describe(value)}")
    problem = _arity_problem(reference, value, "without arguments that returns a Program", ())
    if problem:
        raise ProgramError(problem)
    try:
        made = value()
    except FixstepError:
        raise
    except Exception as exc:
        raise ProgramError(f"{reference} raised {describe_error(exc)}") from exc
    if not isinstance(made, Program):
        raise ProgramError(f"{reference}: expected it to return a Program, got {_describe(made)}")
    return made
