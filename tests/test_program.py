"""What a Program accepts and refuses, and how it is imported by name."""

import functools
import sys

import jax
import numpy as np
import pytest

from fixstep.frontend._program import Program, import_program
from fixstep.targets.errors import ProgramError

X = np.zeros((8, 3), np.float32)


def step(state, batch):
    return state, {}


def with_(**changes):
    return Program(**({"init": {"w": X}, "step": step, "batch": X} | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": jax.ShapeDtypeStruct((8, 3), "float64")},
        {"batch": {"x": X, "nested": [np.int64(3), None, ()]}},
        {"batch": ()},
        {"batch": {"key": jax.random.key(0)}},
        {"init": lambda key: {"w": X}},
        {"step": functools.partial(lambda scale, state, batch: (state, {}), 2.0)},
        {"step": jax.jit(step)},
        {"step": lambda *arguments: arguments},
        {"predict": step, "inputs": X},
        {"name": "digits v1"},
    ],
)
def test_accepted(changes):
    with_(**changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"step": 3}, r"step: expected a function step\(state, batch\) -> \(state, metrics\), got 3 of type int"),
        ({"step": X}, r"step: expected a function .*, got an array float32\[8, 3\]"),
        ({"step": lambda state: state}, r"step: expected a function .*, got <lambda>\(state\) \(too many positional"),
        ({"step": lambda a, b, c: a}, r"step: .*, got <lambda>\(a, b, c\) \(missing a required argument: 'c'\)"),
        ({"init": lambda: {}}, r"init: expected a function init\(key\) -> state, got <lambda>\(\)"),
        ({"evaluate": lambda state: {}}, r"evaluate: expected a function evaluate\(state, batch\) -> metrics"),
        ({"predict": "p", "inputs": X}, r"predict: expected a function predict\(state, inputs\) -> outputs, got 'p'"),
        ({"predict": step}, "predict is given without inputs: pass an example"),
        ({"inputs": X}, "inputs are given without predict"),
        ({"batch": {"x": 1.5}}, r"x: expected an array, got the Python float 1.5; .*numpy.float32\(1.5\)"),
        ({"batch": {"x": [1, 2]}}, "x/1: expected an array, got the Python int 2"),
        ({"batch": 3}, "<the batch itself>: expected an array, got the Python int 3"),
        ({"batch": {"x": np.array([{}])}}, "x: expected numbers, got an array of Python objects"),
        ({"batch": {"x": "text"}}, "x: expected an array, got a str"),
        ({"batch": {"a/b": X, "a": {"b": X}}}, "a/b: 2 leaves share this path; rename a key"),
        (
            {"batch": {"x": jax.ShapeDtypeStruct((None, 3), "float32")}},
            r"x: expected a shape of numbers, got \(None, 3\)",
        ),
        (
            {"predict": step, "inputs": {"x": 1}},
            "leaves of the inputs cannot be compiled:\n  x: expected an array",
        ),
        ({"name": "a/b"}, "name: expected a plain text"),
    ],
)
def test_refused(changes, expected):
    with pytest.raises(ProgramError, match=expected):
        with_(**changes)


def test_all_problems_at_once():
    with pytest.raises(ProgramError, match=r"step: (?s:.*)x: expected(?s:.*)y: expected(?s:.*)without inputs"):
        with_(step=None, batch={"x": 1.0, "y": 2}, predict=step)


def test_a_callable_pytree_is_a_state():
    import equinox as eqx

    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    assert not with_(init=model).init_is_function
    assert with_(init=eqx.filter_jit(lambda key: {"w": X})).init_is_function
    assert with_(init=lambda key: {"w": X}).init_is_function


SOURCE = """
import numpy as np
from fixstep.frontend._program import Program
X = np.zeros((8, 3), np.float32)
program = Program(init={"w": X}, step=lambda s, b: (s, {}), batch=X)
named = Program(init={"w": X}, step=lambda s, b: (s, {}), batch=X, name="other")
def build(): return program
def needs(argument): return program
def fails(): raise RuntimeError("no such file")
def nothing(): return None
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "digits.py").write_text(SOURCE)
    (tmp_path / "mine" / "broken.py").write_text("import numpy\nvalue = 1 / 0\n")
    (tmp_path / "mine" / "lacking.py").write_text("import a_module_that_is_not_there\n")
    return "mine.digits"


@pytest.mark.parametrize(("attribute", "name"), [("program", "digits"), ("build", "digits"), ("named", "other")])
def test_import(module, attribute, name):
    program = import_program(f"{module}:{attribute}")
    assert isinstance(program, Program)
    assert program.name == name


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("mine.digits", "expected a program as module:attribute, as in examples.digits:program, got 'mine.digits'"),
        ("mine.digits:", "expected a program as module:attribute"),
        ("mine.digist:program", r"no module 'mine.digist' in .*; did you mean 'mine.digits'"),
        ("mime.digits:program", r"no module 'mime.digits' in "),
        ("mine.digits:progam", r"mine.digits has no attribute 'progam'; did you mean 'program'"),
        ("mine.digits:number", "expected a Program, or a function that returns one, got 3 of type int"),
        ("mine.digits:needs", r"without arguments .*, got needs\(argument\)"),
        ("mine.digits:fails", r"raised RuntimeError: no such file\n  at mine.digits.py:9, in fails: def fails"),
        ("mine.digits:nothing", "expected it to return a Program, got None"),
        ("mine.broken:program", r"importing 'mine.broken' failed: ZeroDivisionError: .*\n  at mine.broken.py:2"),
        ("mine.lacking:program", "importing 'mine.lacking' failed: it needs 'a_module_that_is_not_there'"),
    ],
)
def test_import_refused(module, reference, expected):
    with pytest.raises(ProgramError, match=expected):
        import_program(reference)


def test_another_package_of_that_name_stands_before_the_folder_here(module, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "yours.py").write_text("")
    (tmp_path / "yours").mkdir()
    (tmp_path / "yours" / "digits.py").write_text(SOURCE)
    sys.path.append(str(tmp_path / "elsewhere"))
    with pytest.raises(ProgramError) as caught:
        import_program("yours.digits:program")
    assert str(caught.value) == (
        f"no module 'yours.digits': 'yours' is {tmp_path}/elsewhere/yours.py, not the folder {tmp_path}/yours; "
        f"rename the folder, or give it an __init__.py"
    )
