"""Weights in a safetensors file: in by name, out by name, and what does not fit."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fixstep.frontend import Program, compile
from fixstep.runtime import CheckpointError, load, load_weights, save_weights
from fixstep.runtime._cli import main

DTYPES = ["float32", "bfloat16", "float16", "int4", "float8_e4m3fn", "float8_e3m4", "bool", "complex64", "uint8"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """Two layers of parameters, a leaf of each dtype, and a counter beside the parameters."""
    path = tmp_path_factory.mktemp("weights") / "a.fixstep"

    def init(key):
        return {
            "params": {"dense": {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}, "half": jnp.ones(2, "bfloat16")},
            "others": {name: jnp.ones(3, name) for name in DTYPES},
            "scale": jnp.float32(1),
            "seen": jnp.int32(0),
        }

    def step(state, batch):
        return state | {"seen": state["seen"] + 1}, {"loss": batch.sum() * state["params"]["dense"]["w"].sum()}

    compile(
        Program(init=init, step=step, batch=jax.ShapeDtypeStruct((1,), "float32"), name="two"), path, targets=["cpu"]
    )
    return path


@pytest.fixture
def session(artifact):
    return load(artifact)


@pytest.fixture
def weights():
    """What another program wrote."""
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    return {"dense/w": w, "dense/b": np.full(3, 7, np.float32), "half": np.full(2, 0.5, ml_dtypes.bfloat16)}


def same(session, state):
    return {p: a.tobytes() for p, a in session.state().items()} == {p: a.tobytes() for p, a in state.items()}


def test_weights_come_in_by_name_and_nothing_else_moves(session, weights, tmp_path):
    session.step(np.ones(1, "f4"))
    save_file(weights, tmp_path / "w.safetensors")
    loaded = load_weights(session, tmp_path / "w.safetensors")
    assert loaded.kept == ("params/dense/b", "params/dense/w", "params/half")
    assert (loaded.missing, loaded.unexpected) == ((), ())
    state = session.state()
    assert all(np.array_equal(state[f"params/{name}"], array) for name, array in weights.items())
    assert (session.steps, state["seen"]) == (1, 1)
    assert float(session.step(np.ones(1, "f4"))["loss"]) == 15


def test_names_are_those_of_the_model(session, weights, tmp_path):
    dots = {name.replace("/", "."): array for name, array in weights.items()}
    save_file(dots, tmp_path / "w.safetensors")
    load_weights(session, tmp_path / "w.safetensors", rename=lambda rest: rest.replace("/", "."))
    names = save_weights(session, tmp_path / "o.safetensors", rename=lambda rest: rest.replace("/", "."))
    assert set(names) == set(dots)
    saved = load_file(tmp_path / "o.safetensors")
    assert {n: a.tobytes() for n, a in saved.items()} == {n: a.tobytes() for n, a in dots.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_goes_out_and_comes_back(dtype, session, tmp_path):
    leaf = f"others/{dtype}"
    value = session.state()[leaf]
    value = (np.array([1, 0, 1]) if dtype == "bool" else np.array([1, 2, 3])).astype(value.dtype)
    session.load_state(session.state() | {leaf: value})
    assert save_weights(session, tmp_path / "o.safetensors", under=leaf) == (dtype,)
    session.load_state(session.state() | {leaf: np.zeros_like(value)})
    assert load_weights(session, tmp_path / "o.safetensors", under=leaf).kept == (leaf,)
    assert session.state()[leaf].tobytes() == value.tobytes()


def test_all_that_does_not_fit_is_said_at_once(session, weights, tmp_path):
    before = session.state()
    weights["dense/w"] = weights["dense/w"].T.copy()
    weights["head"] = weights.pop("dense/b")
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_weights(session, tmp_path / "w.safetensors")
    assert str(error.value) == (
        f"{tmp_path / 'w.safetensors'}: the tensors are not the weights:\n"
        "  params/dense/b, from 'dense/b': expected float32[3], missing\n"
        "  params/dense/w, from 'dense/w': expected float32[2,3], got float32[3,2]\n"
        "  'head': unexpected, float32[3]\n"
        "Take what fits with strict=False (--in-part)."
    )
    assert same(session, before)
    loaded = load_weights(session, tmp_path / "w.safetensors", strict=False)
    assert loaded.kept == ("params/half",)
    assert loaded.missing == ("params/dense/b", "params/dense/w")
    assert set(loaded.unexpected) == {"dense/w", "head"}
    assert same(session, before | {"params/half": weights["half"]})


def test_floats_are_rounded_only_when_asked(session, weights, tmp_path):
    before = session.state()
    exact = weights["dense/w"]
    weights |= {"dense/w": exact.astype(np.float64) * (1 + 1e-12), "dense/b": np.full(3, 1e5, np.float64)}
    weights["half"] = np.array([1.003, 1e39], np.float64)
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(
        CheckpointError, match=r"expected bfloat16\[2\], got float64\[2\]\nRound .* with cast=True \(--cast\)\.$"
    ):
        load_weights(session, tmp_path / "w.safetensors")
    assert same(session, before)
    load_weights(session, tmp_path / "w.safetensors", cast=True)
    assert np.array_equal(session.state()["params/dense/w"], exact)
    assert session.state()["params/half"].astype("f4").tolist() == [1.0, np.inf]
    save_file(weights | {"half": np.ones(2, np.int32)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"expected bfloat16\[2\], got int32\[2\]"):
        load_weights(session, tmp_path / "w.safetensors", cast=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"under": "model"},
            "no leaf of the state is below 'model'; there are leaves below others, params, scale, seen",
        ),
        ({"under": "par"}, "no leaf of the state is below 'par'"),
        ({"rename": lambda rest: "x"}, "rename gives the leaves 'params/dense/b' and 'params/half' one name"),
        ({"under": ""}, "Say with under= (--under) where the names begin, and with rename= how they are spelt."),
    ],
)
def test_names_that_lead_nowhere(options, said, session, weights, tmp_path):
    save_file(weights, tmp_path / "w.safetensors")
    before = session.state()
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load_weights(session, tmp_path / "w.safetensors", **options)
    assert same(session, before)


def test_files_that_are_none(session, tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(CheckpointError, match=re.escape(f"{path}")):
        load_weights(session, path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_weights(session, path)
    save_file({"half": np.ones(1000, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_weights(session, path)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save_weights(session, tmp_path / "none" / "w.safetensors")


def test_from_the_command_line(artifact, session, weights, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_file(weights, "w.safetensors")
    (tmp_path / "data.py").write_text("import numpy as np\n\ndef ones():\n    return [np.ones(1, 'f4')]\n")
    run = ["run", str(artifact), "--data", "data:ones", "--epochs", "1", "--checkpoint-dir", "c", "--weights"]
    assert main([*run, "w.safetensors"]) == 0
    assert "w.safetensors: 3 leaves taken\n" in capsys.readouterr().out
    assert main(["export", "c", "-o", "o.safetensors"]) == 0
    out = capsys.readouterr().out
    assert out == (
        "wrote o.safetensors: 3 tensors of c/step-00000001.safetensors (1 steps)\n  dense/b\n  dense/w\n  half\n"
    )
    saved = load_file("o.safetensors")
    assert {n: a.tobytes() for n, a in saved.items()} == {n: a.tobytes() for n, a in weights.items()}
    assert main(["export", "c", "--under", "model", "-o", "p.safetensors"]) == 2
    assert "no leaf of the state is below 'model'" in capsys.readouterr().err
    save_file({"dense/b": weights["dense/b"]}, "w.safetensors")
    assert main([*run, "w.safetensors"]) == 2
    assert "Take what fits with strict=False (--in-part)." in capsys.readouterr().err
    run[run.index("c")] = "d"
    assert main([*run, "w.safetensors", "--in-part"]) == 0
    assert "1 leaves kept, 2 missing, 0 unexpected\n  kept: params/dense/b\n" in capsys.readouterr().out


def test_a_checkpoint_is_told_apart(session, tmp_path):
    session.save(tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match="a checkpoint: take it with load_leaves"):
        load_weights(session, tmp_path / "c.safetensors")
