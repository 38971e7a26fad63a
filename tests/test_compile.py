"""From a program to an artifact: what is kept, what is refused and in which words, and what is cached."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import tiny_batch

from fixstep.frontend import Program, compile, verify_artifact
from fixstep.runtime import Artifact, ArtifactError, CompileError, MismatchError, TargetError, load
from fixstep.runtime._artifact import write_artifact
from fixstep.runtime._cli import main

X = {"x": jax.ShapeDtypeStruct((4,), "float32")}


def program(step, init=None, batch=None, **options):
    return Program(
        init={"w": jnp.ones(4)} if init is None else init, step=step, batch=X if batch is None else batch, **options
    )


def members(path):
    artifact = Artifact.open(path)
    return {name: bytes(artifact.member(name)) for name in artifact.manifest["members"]}


def test_the_artifact_holds_every_function_and_the_original(tiny_artifact):
    artifact = Artifact.open(tiny_artifact)
    assert set(artifact.manifest["functions"]) == {"init", "step", "evaluate", "predict"}
    assert set(artifact.manifest["members"]) == {
        "modules/cpu.vmfb",
        "program.mlir",
        *(f"reference/{name}.jax" for name in ("init", "step", "evaluate", "predict")),
    }
    assert "loc(" not in bytes(artifact.member("program.mlir")).decode()


def test_the_same_program_gives_the_same_bytes(tiny_program, tiny_artifact, tmp_path):
    compile(tiny_program, tmp_path / "again.fixstep")
    assert (tmp_path / "again.fixstep").read_bytes() == tiny_artifact.read_bytes()


def test_unused_arguments_are_kept(tmp_path):
    init = {"used": jnp.ones(4), "unused": jnp.arange(3)}
    batch = {"x": X["x"], "ignored": jax.ShapeDtypeStruct((2,), "int32")}
    compile(program(lambda s, b: ({**s, "used": s["used"] + 1}, {}), init, batch), tmp_path / "a.fixstep")
    session = load(tmp_path / "a.fixstep")
    session.step({"x": np.zeros(4, np.float32), "ignored": np.zeros(2, np.int32)})
    np.testing.assert_array_equal(session.state()["unused"], [0, 1, 2])
    np.testing.assert_array_equal(session.state()["used"], np.full(4, 2))


def test_a_donating_step_is_compiled_without_donation(tmp_path):
    def swap(state, batch):
        return {"a": state["b"] + batch["x"], "b": state["a"] * 0.5}, {"sum": state["a"].sum()}

    init = {"a": jnp.arange(4.0), "b": jnp.ones(4)}
    compile(program(jax.jit(swap, donate_argnums=0), init), tmp_path / "a.fixstep")
    text = bytes(Artifact.open(tmp_path / "a.fixstep").member("program.mlir")).decode()
    assert "tf.aliasing_output" not in text
    assert "jax.buffer_donor" not in text
    session, state = load(tmp_path / "a.fixstep"), init
    for i in range(5):
        x = np.full(4, i, np.float32)
        session.step({"x": x})
        state, _ = swap(state, {"x": x})
    for path, leaf in session.state().items():
        np.testing.assert_array_equal(leaf, state[path])


def test_float64_stays_float64(tmp_path):
    init = {"w": np.full(4, 1 / 3)}
    batch = {"x": np.array([1e-12, 0, 0, 0])}

    def step(state, batch):
        return {"w": state["w"] * (1 + batch["x"].mean())}, {"sum": state["w"].sum()}

    compile(program(step, init, batch), tmp_path / "a.fixstep")
    session = load(tmp_path / "a.fixstep")
    metrics = session.step(batch)
    assert session.state()["w"].dtype == np.float64
    assert float(metrics["sum"]) == pytest.approx(4 / 3, rel=1e-15)
    np.testing.assert_allclose(session.state()["w"], (1 / 3) * (1 + 2.5e-13), rtol=1e-16)


def test_state_and_results_that_are_the_same_value_have_storage_of_their_own(tmp_path):
    def step(state, batch):
        value = state["a"] * 0.5 + batch["x"]
        return {"a": value, "b": value, "c": state["c"], "d": jnp.zeros(4)}, {"a": value.sum(), "b": value.sum()}

    init = {name: jnp.zeros(4) for name in "abcd"} | {"c": jnp.arange(4.0)}
    compile(program(step, init), tmp_path / "a.fixstep")
    session = load(tmp_path / "a.fixstep")
    for i in range(1, 4):
        session.step({"x": np.full(4, i, np.float32)})
    state = session.state()
    np.testing.assert_array_equal(state["a"], np.full(4, 3 + 2 / 2 + 1 / 4))
    np.testing.assert_array_equal(state["b"], state["a"])
    np.testing.assert_array_equal(state["c"], np.arange(4))
    np.testing.assert_array_equal(state["d"], np.zeros(4))


def test_the_initial_state_of_a_program_that_brings_it_is_exact(tmp_path):
    rng = np.random.default_rng(0)
    init = {
        name: rng.standard_normal(5).astype(name)
        for name in ("float32", "float16", "float64", ml_dtypes.bfloat16.__name__)
    } | {"empty": np.zeros((0, 2), np.float32), "flag": np.array([True, False]), "scalar": np.int8(-3)}
    compile(program(lambda s, b: (s, {}), init), tmp_path / "a.fixstep")
    for path, leaf in load(tmp_path / "a.fixstep").state().items():
        assert leaf.dtype == np.asarray(init[path]).dtype
        assert leaf.tobytes() == np.asarray(init[path]).tobytes(), path


def test_several_targets_share_one_artifact_and_the_best_is_taken(tiny_program, tmp_path):
    compile(tiny_program, tmp_path / "a.fixstep", targets=["cpu", "cpu:host", "cpu:aarch64-linux-gnu"])
    assert load(tmp_path / "a.fixstep").choice.target == "cpu:host"
    assert load(tmp_path / "a.fixstep", target="cpu").choice.target == "cpu:host"
    with pytest.raises(TargetError, match="it is code for aarch64, and this machine is"):
        load(tmp_path / "a.fixstep", target="cpu:aarch64-linux-gnu")


def test_a_target_for_another_machine_is_compiled_but_not_compared(tiny_program, tmp_path):
    compiled = compile(tiny_program, tmp_path / "a.fixstep", targets=["cpu:aarch64-linux-gnu"])
    assert compiled.verifications == ()
    assert "it is code for aarch64" in compiled.unverified["cpu:aarch64-linux-gnu"]


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (["tpu"], "unknown target 'tpu': expected one of cpu"),
        (["cpu:no-such-processor"], "the compiler does not know target 'cpu:no-such-processor'"),
        ([], "no target given"),
        ("cpu", r"targets is a list: write targets=\['cpu'\]"),
    ],
)
def test_wrong_targets_are_refused(tiny_program, tmp_path, targets, text):
    with pytest.raises(TargetError, match=text):
        compile(tiny_program, tmp_path / "a.fixstep", targets=targets)
    assert list(tmp_path.iterdir()) == []


def test_dtypes_that_the_target_cannot_hold_are_refused_by_leaf(tmp_path):
    init = {"a": np.zeros(4, ml_dtypes.float4_e2m1fn), "b": {"c": np.zeros(4, ml_dtypes.float6_e2m3fn)}}
    with pytest.raises(
        TargetError,
        match=r"target cpu cannot hold these leaves:\n  state a: float4_e2m1fn\[4\]; use float8_e4m3fn.*\n  state b/c",
    ):
        compile(program(lambda s, b: (s, {}), init), tmp_path / "a.fixstep")


def host_callback(state, batch):
    doubled = jax.pure_callback(lambda v: np.asarray(v) * 2, X["x"], batch["x"])  # LINE callback
    return {"w": state["w"] + doubled}, {}


def debug_print(state, batch):
    jax.debug.print("x {}", batch["x"])  # LINE print
    return state, {}


def pooling_gradient(state, batch):
    def loss(w):
        pooled = jax.lax.reduce_window(w, -jnp.inf, jax.lax.max, (3,), (1,), "VALID")  # LINE pool
        return pooled.sum()

    return {"w": state["w"] - jax.grad(loss)(state["w"])}, {}


def lapack(state, batch):
    return {"w": jax.scipy.linalg.schur(jnp.outer(state["w"], batch["x"]))[0][0]}, {}  # LINE schur


@pytest.mark.parametrize(
    ("step", "mark", "text"),
    [
        (host_callback, "callback", "callback"),
        (debug_print, "print", "callback|debug"),
        (lapack, "schur", "schur|gees|lapack"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name_and_line(tmp_path, step, mark, text):
    source = Path(__file__).read_text().splitlines()
    line = next(n for n, code in enumerate(source, 1) if code.endswith(f"# LINE {mark}"))
    with pytest.raises(CompileError, match=f"(?i)({text}).*test_compile.py:{line}"):
        compile(program(step), tmp_path / "a.fixstep")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_compiler_gives_one_short_message_and_a_log(tmp_path, monkeypatch):
    monkeypatch.setenv("FIXSTEP_CACHE_DIR", str(tmp_path / "cache"))
    from fixstep.frontend import _iree
    from fixstep.targets import parse

    function = "func.func public @step(%arg0: tensor<4xf32>) -> tensor<2xf32>"
    text = f"module {{\n  {function} {{\n    return %arg0 : tensor<4xf32>\n  }}\n}}\n"
    with pytest.raises(CompileError) as caught:
        _iree.compile_module(text, parse("cpu"), {3: "train.py:12"})
    message = str(caught.value)
    assert message.startswith("compiling for cpu failed, at train.py:12:\n")
    assert len(message.splitlines()) == 3
    log = Path(message.partition("The full log is in ")[2].partition(". If")[0])
    assert "error:" in log.read_text()


def test_compiled_modules_are_cached_and_a_damaged_entry_is_not_used(tiny_program, tmp_path, monkeypatch):
    monkeypatch.setenv("FIXSTEP_CACHE_DIR", str(tmp_path / "cache"))
    compile(tiny_program, tmp_path / "a.fixstep")
    (entry,) = (tmp_path / "cache").glob("*.vmfb")
    first = entry.stat().st_ino
    compile(tiny_program, tmp_path / "b.fixstep")
    assert entry.stat().st_ino == first
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)
    compile(tiny_program, tmp_path / "c.fixstep")
    assert (tmp_path / "c.fixstep").read_bytes() == (tmp_path / "a.fixstep").read_bytes()
    assert entry.read_bytes() != bytes(data)


@pytest.fixture
def wrong_artifact(tiny_program, tiny_artifact, tmp_path):
    """An artifact whose code takes another learning rate than the program that it says it holds."""

    def other_step(state, batch):
        new, metrics = tiny_program.step(state, batch)
        return {"w": state["w"] + (new["w"] - state["w"]) * 1.01, "steps": new["steps"]}, metrics

    other = Program(
        name="tiny", init=tiny_program.init, step=other_step, evaluate=tiny_program.evaluate,
        predict=tiny_program.predict, batch=tiny_program.batch, inputs=tiny_program.inputs,
    )  # fmt: skip
    compile(other, tmp_path / "other.fixstep")
    right = Artifact.open(tiny_artifact)
    manifest = {key: value for key, value in right.manifest.items() if key != "members"}
    grafted = members(tiny_artifact) | {"modules/cpu.vmfb": members(tmp_path / "other.fixstep")["modules/cpu.vmfb"]}
    write_artifact(tmp_path / "wrong.fixstep", manifest, grafted)
    return tmp_path / "wrong.fixstep"


def test_verify_finds_a_step_that_is_wrong_by_one_percent_of_the_update(wrong_artifact, tiny_artifact):
    (right,), _ = verify_artifact(tiny_artifact, steps=5)
    assert right.passed, right.describe()
    (wrong,), _ = verify_artifact(wrong_artifact, steps=1)
    assert not wrong.passed
    assert "state/w" in [leaf.path for leaf in wrong.leaves if not leaf.passed]
    assert "state/steps" not in [leaf.path for leaf in wrong.leaves if not leaf.passed]


def test_a_leaf_that_holds_infinities_is_compared(tmp_path):
    """To move an infinity by a part of itself gives no number, and with that as JAX's own noise anything would pass."""
    init = {"best": jnp.array([jnp.inf, -jnp.inf, 2.0]), "w": jnp.ones(4)}
    step = lambda s, b: ({"best": jnp.minimum(s["best"], jnp.inf), "w": s["w"] * 0.5}, {"loss": b["x"].sum()})  # noqa: E731
    compiled = compile(program(step, init), tmp_path / "a.fixstep", targets=["cpu"])
    bounds = {leaf.path: leaf.bound for leaf in compiled.verifications[0].leaves}
    assert bounds["state/best"] < 1e-4
    assert all(np.isfinite(bound) for bound in bounds.values())


def test_what_cannot_be_judged_is_said(tmp_path):
    """The metric is finite or not by the last bit of the state."""
    step = lambda s, b: (s, {"loss": jnp.log(s["w"].sum() - jnp.float32(4)), "sum": b["x"].sum()})  # noqa: E731
    compiled = compile(program(step), tmp_path / "a.fixstep", targets=["cpu"])
    said = compiled.verifications[0].describe()
    assert "\n  not judged, since JAX's own numbers come or cease to be infinite or NaN when the start moves by" in said
    assert "metrics of step 1/loss" in said
    assert "sum" not in said.partition("not judged")[2]


def test_the_command_verify_exits_1_on_a_mismatch(wrong_artifact, tiny_artifact, tmp_path, capsys):
    assert main(["verify", str(tiny_artifact)]) == 0
    assert "cpu: agrees with JAX over 10 steps; worst leaf" in capsys.readouterr().out
    assert main(["verify", str(wrong_artifact), "--steps", "1"]) == 1
    error = capsys.readouterr().err
    assert "fixstep: error: cpu: does not compute what JAX computes" in error
    assert "state/w (float32): off by" in error
    np.savez(tmp_path / "data.npz", **tiny_batch())
    assert main(["verify", str(tiny_artifact), "--data", str(tmp_path / "data.npz")]) == 0
    assert main(["verify", str(tiny_artifact), "--steps", "0"]) == 2


def test_compile_replaces_the_old_artifact_only_when_the_new_one_is_right(tiny_program, tiny_artifact, tmp_path):
    path = tmp_path / "a.fixstep"
    path.write_bytes(tiny_artifact.read_bytes())
    with pytest.raises(CompileError):
        compile(program(host_callback), path)
    assert path.read_bytes() == tiny_artifact.read_bytes()
    with pytest.raises(ArtifactError, match="no-such-folder"):
        compile(tiny_program, tmp_path / "no-such-folder" / "a.fixstep")
    assert [file.name for file in tmp_path.iterdir()] == ["a.fixstep"]


PROGRAM_FILE = """
import jax, jax.numpy as jnp
from fixstep.frontend import Program
def init(key):
    return {"w": jnp.ones(3, jnp.bfloat16), "momentum": jnp.zeros(3, jnp.bfloat16)}
def step(state, batch):
    momentum = state["momentum"] + batch["x"]
    return {"w": state["w"] + 1, "momentum": momentum}, {"loss": momentum.sum()}
program = Program(init=init, step=step, batch={"x": jax.ShapeDtypeStruct((3,), "float32")})
"""


def test_the_command_compile_prints_the_report(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM_FILE)
    command = [sys.executable, "-m", "fixstep.runtime._cli", "compile", "train:program", "-o", "train.fixstep"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 state leaves; types moved in 1 round:" in done.stdout
    assert "momentum  bfloat16[3] → float32[3]  in round 1" in done.stdout
    assert "cpu: agrees with JAX over 2 steps" in done.stdout
    assert "wrote train.fixstep" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere:program"], "nowhere"),
        (["train:missing"], "missing"),
        (["train"], "module:attribute"),
        (["train:program", "--target", "tpu"], "unknown target 'tpu'"),
    ],
)
def test_the_command_compile_answers_mistakes_without_a_traceback(tmp_path, arguments, text):
    (tmp_path / "train.py").write_text(PROGRAM_FILE)
    command = [sys.executable, "-m", "fixstep.runtime._cli", "compile", *arguments, "-o", "train.fixstep"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("fixstep: error: ")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "train.fixstep").exists()


def test_mismatch_is_an_arithmetic_error():
    assert issubclass(MismatchError, ArithmeticError)
