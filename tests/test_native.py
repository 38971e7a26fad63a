"""The C library: its own tests, and that it is the same runtime as Python's, bit for bit, on real compiled steps."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import iree.runtime
import numpy as np
import pytest
from _container import container, pairs
from conftest import tiny_batch

from fixstep.runtime import ArrayData, Loop, load
from fixstep.runtime._artifact import Artifact
from fixstep.runtime._checkpoint import read_checkpoint
from fixstep.runtime._npz import load_npz
from fixstep.targets import cuda, vulkan
from fixstep.targets.errors import FixstepError, TargetError

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "runtime/native/tests/corpus"
RUN_MODULE = Path(iree.runtime.__file__).parent.parent / "_runtime_libs" / "iree-run-module"
# Where an IREE runtime is installed, the tests run on the library's own backend too.
IREE_DIR = os.environ.get("FIXSTEP_IREE_RUNTIME_DIR")
LIBRARIES = ("jansson", "libsodium", "minizip", "zlib")


def _absent() -> str | None:
    for program in ("cmake", "cc", "c++", "pkg-config"):
        if shutil.which(program) is None:
            return f"no {program}"
    if subprocess.run(["pkg-config", "--exists", *LIBRARIES]).returncode != 0:
        return f"not all of the libraries {', '.join(LIBRARIES)}"
    return None


pytestmark = pytest.mark.skipif(_absent() is not None, reason=f"the C library cannot be built here: {_absent()}")


def _run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _build(folder: Path, *options: str) -> Path:
    _run("cmake", "-S", ROOT, "-B", folder, "-DFIXSTEP_BUILD_TESTS=ON", "-DFIXSTEP_WARNINGS_AS_ERRORS=ON", *options)
    _run("cmake", "--build", folder)
    return folder


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> Path:
    """The library and its tests as users build them."""
    return _build(tmp_path_factory.mktemp("native") / "plain", "-DFIXSTEP_WITH_IREE=OFF")


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory) -> Path:
    """The same under the address, leak and undefined-behaviour sanitizers, and on IREE where it is installed."""
    iree_option = f"-DIREERuntime_DIR={IREE_DIR}" if IREE_DIR else "-DFIXSTEP_WITH_IREE=OFF"
    options = ("-DFIXSTEP_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", iree_option)
    return _build(tmp_path_factory.mktemp("native") / "sanitized", *options)


@pytest.fixture(scope="session", params=["run-module", *(["iree"] if IREE_DIR else [])])
def native(request, sanitized, tiny_artifact):
    """Runs commands on a session of the tiny artifact in C: one text for each command."""

    def run(*commands: str, artifact: Path = tiny_artifact, run_module: Path = RUN_MODULE) -> list[str]:
        tool = sanitized / "runtime/native/tests/session_tool"
        backend = "-" if request.param == "iree" and run_module == RUN_MODULE else run_module
        out = _run(tool, backend, artifact, *commands)
        return [part.strip("\n") for part in out.split("--\n")][: len(commands)]

    return run


@pytest.fixture(scope="session")
def batch_files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("batches")
    paths = [folder / f"batch{seed}.npz" for seed in range(9)]
    for seed, path in enumerate(paths):
        np.savez(path, **tiny_batch(seed))
    return paths


def test_its_own_tests(plain):
    _run("ctest", "--output-on-failure", "-LE", "fuzz", cwd=plain)


def test_its_own_tests_under_sanitizers_and_mutated_files(sanitized):
    _run("ctest", "--output-on-failure", cwd=sanitized)


def test_the_corpus_is_what_python_reads():
    assert Artifact.open(CORPUS / "artifact-whole").program == "ab" * 32
    assert read_checkpoint(CORPUS / "checkpoint-whole").steps == 7


def test_step_evaluate_and_predict_give_pythons_bits(native, tiny_artifact, batch_files, tmp_path):
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, x=tiny_batch(5)["x"])
    session = load(tiny_artifact, seed=2**40 + 3)
    start = session.state()["w"].tobytes().hex()
    losses = [float(session.step(tiny_batch(seed))["loss"]) for seed in (0, 1)]
    evaluated = float(session.evaluate(tiny_batch(2))["loss"])
    out = native(
        f"open|{2**40 + 3}", "leaf|w", f"call|step|{batch_files[0]}", "metric|step|loss",
        f"call|step|{batch_files[1]}", "metric|step|loss", "average|step|loss", "leaf|w", "leaf|steps",
        f"call|evaluate|{batch_files[2]}", "metric|evaluate|loss", "average|evaluate|loss",
        f"call|predict|{inputs}", "result|predict|y", "leaf|w", "steps",
    )  # fmt: skip
    w = session.state()["w"].tobytes().hex()
    assert out[1] == start
    assert [float(out[3]), float(out[5])] == losses
    assert float(out[6]) == session.averages()["loss"]
    assert out[7] == out[14] == w
    assert out[8] == "02000000"
    assert float(out[10]) == evaluated == float(out[11])
    assert out[13] == session.predict({"x": tiny_batch(5)["x"]})["y"].tobytes().hex()
    assert out[15] == "2"


def test_a_run_goes_from_python_to_c_and_back(native, tiny_artifact, batch_files, tmp_path):
    whole = load(tiny_artifact, seed=1)
    for seed in range(9):
        whole.step(tiny_batch(seed))
    first, second = tmp_path / "first", tmp_path / "second"
    session = load(tiny_artifact, seed=1)
    for seed in range(3):
        session.step(tiny_batch(seed))
    position = {"epoch": 3, "seed": 2**100, "text": 'é"\\\n', "list": [1.5, None, True, 1e-7]}
    session.save(first, position=position)
    steps = [f"call|step|{path}" for path in batch_files[3:6]]
    out = native("open|0", f"restore|{first}", *steps, f'save|{second}|{{"epoch": 4}}', "steps")
    assert out[-1] == "6"
    session = load(tiny_artifact, seed=7)
    assert session.restore(second) == {"epoch": 4}
    for seed in range(6, 9):
        session.step(tiny_batch(seed))
    assert session.steps == 9
    assert session.averages() == whole.averages()
    assert {k: v.tobytes() for k, v in session.state().items()} == {k: v.tobytes() for k, v in whole.state().items()}


def test_checkpoints_of_both_have_the_same_bytes(native, tiny_artifact, tmp_path):
    session = load(tiny_artifact, seed=1)
    session.step(tiny_batch())
    session.save(tmp_path / "python", position={"a": [1, 2.5, None, 'é"\\\n\t'], "b": {}})
    first = native("open|0", f"restore|{tmp_path / 'python'}")[1]
    position = first.splitlines()[0].removeprefix("found ")
    native("open|0", f"restore|{tmp_path / 'python'}", f"save|{tmp_path / 'c'}|{position}")
    assert (tmp_path / "c").read_bytes() == (tmp_path / "python").read_bytes()


# Leaf paths with dtype and shape, as Python and C are given them.
WRONG = {
    "dtype": {"x": ("float64", (8, 4)), "y": ("float32", (8, 3))},
    "unsigned": {"x": ("uint32", (8, 4)), "y": ("float32", (8, 3))},
    "rank": {"x": ("float32", (8, 4, 1)), "y": ("float32", (8, 3))},
    "scalar": {"x": ("float32", ()), "y": ("float32", (8, 3))},
    "short batch": {"x": ("float32", (7, 4)), "y": ("float32", (7, 3))},
    "empty batch": {"x": ("float32", (0, 4)), "y": ("float32", (8, 3))},
    "missing": {"y": ("float32", (8, 3))},
    "nothing": {},
    "misspelled": {"X": ("float32", (8, 4)), "ys": ("float32", (8, 3))},
    "quoted": {"x'": ("float32", (8, 4)), 'y"': ("int8", ())},
    "below": {"x/a": ("float32", (4,)), "x/b": ("float32", (4,)), "y": ("float32", (8, 3))},
    "unexpected": {"x": ("float32", (8, 4)), "y": ("float32", (8, 3)), "z": ("bool", (2,)), "a/b": ("int64", ())},
    "everything": {"x": ("bfloat16", (3,)), "yy": ("float32", (8, 3)), "z": ("complex64", (1, 1))},
}


def _zeros(leaves: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    from fixstep.runtime._signature import dtype_from_name

    return {path: np.zeros(shape, dtype_from_name(dtype)) for path, (dtype, shape) in leaves.items()}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_batch_gives_the_same_text(native, tiny_artifact, case):
    session = load(tiny_artifact)
    words = "".join(f"|{p} {dtype} {','.join(map(str, shape))}" for p, (dtype, shape) in WRONG[case].items())
    out = native("open|0", *(f"fit|{what}{words}" for what in ("step", "predict", "state")))
    for text, call in zip(out[1:], (session.step, session.predict, session.load_state), strict=True):
        with pytest.raises(FixstepError) as caught:
            call(_zeros(WRONG[case]))
        assert text == f"error 3 {caught.value}"


def test_names_that_are_alike_are_found_as_python_finds_them(native, tiny_artifact):
    rng = np.random.default_rng(0)
    session = load(tiny_artifact)
    for _ in range(20):
        names = {"".join(rng.choice(list("xystepw/AB"), rng.integers(1, 6))).strip("/") or "q" for _ in range(6)}
        names = {name for name in names if name.partition("/")[0] not in ("w", "steps")}
        leaves = dict.fromkeys(sorted(names), ("int8", (1,)))
        words = "".join(f"|{name} int8 1" for name in leaves)
        with pytest.raises(FixstepError) as caught:
            session.load_state(_zeros(leaves))
        assert native("open|0", f"fit|state{words}")[1] == f"error 3 {caught.value}"


def test_every_dtype_has_its_name_in_c(native, tiny_artifact):
    from fixstep.runtime._signature import _EXTENSION_DTYPES

    plain = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    names = ["bool", *plain, "float16", "float32", "float64", "complex64", "complex128", *_EXTENSION_DTYPES]
    session = load(tiny_artifact)
    out = native("open|0", *(f"fit|step|x {name} 8,4|y float32 8,3" for name in names if name != "float32"))
    for name, text in zip([name for name in names if name != "float32"], out[1:], strict=True):
        with pytest.raises(FixstepError) as caught:
            session.step(_zeros({"x": (name, (8, 4)), "y": ("float32", (8, 3))}))
        assert text == f"error 3 {caught.value}"


def test_states_of_every_kind_of_dtype_take_the_same_steps(native, tmp_path):
    import jax
    import jax.numpy as jnp

    from fixstep.frontend import Program, compile

    dtypes = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int4", "uint4", "float16", "bfloat16", "float32"]
    dtypes += ["float8_e4m3fn", "float8_e5m2"]

    def init(key):
        numbers = {name: jnp.arange(6).reshape(2, 3).astype(name) for name in dtypes}
        waves = jnp.array([1 + 2j, 3 - 1j], jnp.complex64)
        return {**numbers, "key": key, "flag": jnp.array([True, False]), "waves": waves, "none": jnp.zeros((0, 2))}

    def step(state, batch):
        key, used = jax.random.split(state["key"])
        moved = {name: (state[name].astype("float32") * batch["scale"]).astype(name) for name in dtypes}
        noise = jax.random.uniform(used, (2, 3))
        moved["float32"] = moved["float32"] + noise
        rest = {"flag": ~state["flag"], "waves": state["waves"] * (1 - 1j), "none": state["none"], "key": key}
        return {**moved, **rest}, {"loss": noise.sum(), "half": noise.sum().astype("bfloat16")}

    program = Program(init=init, step=step, batch={"scale": jax.ShapeDtypeStruct((), "float32")}, name="kinds")
    path = tmp_path / "kinds.fixstep"
    compile(program, path, targets=["cpu"])
    session = load(path, seed=5)
    session.save(tmp_path / "start")
    for _ in range(2):
        session.step({"scale": np.float32(0)})
    session.save(tmp_path / "python")
    out = native("open|5", f"save|{tmp_path}/c-start|{{}}", "fit|step|scale float32 ", "fit|step|scale float32 ",
                 f"save|{tmp_path}/c|{{}}", "average|step|loss", "average|step|half", artifact=path)  # fmt: skip
    assert (tmp_path / "c-start").read_bytes() == (tmp_path / "start").read_bytes()
    assert (tmp_path / "c").read_bytes() == (tmp_path / "python").read_bytes()
    assert {"loss": float(out[5]), "half": float(out[6])} == session.averages()
    native("open|0", f"restore|{tmp_path / 'python'}", f"save|{tmp_path}/again|{{}}", artifact=path)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "python").read_bytes()


def test_averages_are_read_from_sums_as_python_reads_them(native, tmp_path):
    import jax
    import jax.numpy as jnp
    import optax

    from fixstep.frontend import compile, metrics, trainer

    model = (lambda key: {"w": jax.random.normal(key, (4, 3))}, lambda params, inputs: inputs @ params["w"])
    examples = (jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((8,), "int32"))
    more = {"accuracy": metrics.accuracy, "perplexity": metrics.perplexity, "table": metrics.confusion_matrix,
            "f1": metrics.f1(average="macro"),
            "seen": lambda prediction, target: metrics.Total(jnp.int32(len(target)))}  # fmt: skip
    loss = optax.softmax_cross_entropy_with_integer_labels
    path = tmp_path / "sums.fixstep"
    compile(trainer(model, loss, optax.sgd(0.1), batch=examples, metrics=more), path, targets=["cpu"])
    session = load(path, seed=1)
    rng = np.random.default_rng(0)
    names = [leaf.path for leaf in session.signature("step")]
    files = [tmp_path / f"{n}.npz" for n in range(3)]
    for file in files:
        arrays = (rng.standard_normal((8, 4)).astype("float32"), rng.integers(0, 3, 8).astype("int32"))
        batch = dict(zip(names, arrays, strict=True))
        session.step(batch)
        np.savez(file, **batch)
    averages = session.averages()
    assert set(averages) == {"loss", "accuracy", "perplexity", "f1", "seen"}
    out = native("open|1", *(f"call|step|{file}" for file in files), *(f"average|step|{name}" for name in averages),
                 "sum|step|total/table", "reset|step", "average|step|seen", artifact=path)  # fmt: skip
    assert dict(zip(averages, map(float, out[4:9]), strict=True)) == averages
    assert out[9] == session.totals()["table"].tobytes().hex()
    assert out[11] == "nan"


@pytest.fixture(scope="session")
def any_size(tmp_path_factory) -> Path:
    """An artifact for batches of 2 to 16 examples."""
    import jax
    import jax.numpy as jnp

    from fixstep.frontend import Program, compile

    (b,) = jax.export.symbolic_shape("b", constraints=["b <= 16", "b >= 2"])

    def loss(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    def step(state, batch):
        value, gradient = jax.value_and_grad(loss)(state["w"], batch)
        return {"w": state["w"] - 0.1 * gradient}, {"loss": value}

    program = Program(
        name="any", init=lambda key: {"w": jax.random.normal(key, (4,))}, step=step,
        evaluate=lambda state, batch: {"loss": loss(state["w"], batch)},
        predict=lambda state, inputs: {"y": inputs["x"] @ state["w"], "t": jnp.outer(state["w"], inputs["x"][:, 0])},
        batch={"x": jax.ShapeDtypeStruct((b, 4), "float32"), "y": jax.ShapeDtypeStruct((b,), "float32")},
        inputs={"x": jax.ShapeDtypeStruct((b, 4), "float32")},
    )  # fmt: skip
    path = tmp_path_factory.mktemp("any") / "any.fixstep"
    compile(program, path, targets=["cpu"])
    return path


def test_batches_of_any_size_give_pythons_bits(native, any_size, tmp_path):
    session = load(any_size, seed=3)
    rng = np.random.default_rng(0)
    commands, losses = [], []
    for number, size in enumerate((16, 5, 2, 16, 11, 3)):
        batch = {"x": rng.standard_normal((size, 4)).astype("float32"), "y": np.ones(size, "float32")}
        np.savez(tmp_path / f"{number}.npz", **batch)
        losses.append(float(session.step(batch)["loss"]))
        commands += [f"call|step|{tmp_path}/{number}.npz", "metric|step|loss"]
    np.savez(tmp_path / "inputs.npz", x=batch["x"])
    outputs = session.predict({"x": batch["x"]})
    session.save(tmp_path / "python")
    out = native("open|3", *commands, "average|step|loss", "leaf|w", f"call|predict|{tmp_path}/inputs.npz",
                 "result|predict|y|12", "result|predict|t|48", "result|predict|y|64", f"save|{tmp_path}/c|{{}}",
                 artifact=any_size)  # fmt: skip
    assert [float(text) for text in out[2:13:2]] == losses
    assert float(out[13]) == session.averages()["loss"]
    assert out[14] == session.state()["w"].tobytes().hex()
    assert out[16] == outputs["y"].tobytes().hex()
    assert out[17] == outputs["t"].tobytes().hex()
    assert out[18] == "error 1 y: expected room for 12 bytes, got 64"
    assert (tmp_path / "c").read_bytes() == (tmp_path / "python").read_bytes()


@pytest.mark.parametrize(
    "leaves",
    [
        {"x": ("float32", (17, 4)), "y": ("float32", (17,))},
        {"x": ("float32", (1, 4)), "y": ("float32", (1,))},
        {"x": ("float32", (5, 4)), "y": ("float32", (6,))},
        {"x": ("float32", (5, 3)), "y": ("float32", (5,))},
        {"x": ("int32", (5, 4)), "y": ("float32", (5,))},
        {"y": ("float32", (5,))},
        {},
    ],
)
def test_a_wrong_size_gives_the_same_text(native, any_size, leaves):
    session = load(any_size)
    words = "".join(f"|{p} {dtype} {','.join(map(str, shape))}" for p, (dtype, shape) in leaves.items())
    out = native("open|0", f"fit|step{words}", f"fit|predict{words}", artifact=any_size)
    for text, call in zip(out[1:], (session.step, session.predict), strict=True):
        with pytest.raises(FixstepError) as caught:
            call(_zeros(leaves))
        assert text == f"error 3 {caught.value}"


def test_vulkan_takes_the_same_steps(sanitized, tiny_program, batch_files, tmp_path):
    from fixstep.frontend import compile

    if not IREE_DIR:
        pytest.skip("no IREE runtime is installed (FIXSTEP_IREE_RUNTIME_DIR)")
    path = tmp_path / "tiny.fixstep"
    compile(tiny_program, path, targets=["vulkan"])
    session = load(path, seed=1)
    for _ in range(2):
        for seed in range(9):
            session.step(tiny_batch(seed))
    session.save(tmp_path / "python")
    steps = [f"call|step|{file}" for file in batch_files] * 2
    tool = sanitized / "runtime/native/tests/session_tool"
    out = _run(tool, "-", path, "open|1", *steps, "average|step|loss", f"save|{tmp_path}/c|{{}}")
    if "no such device" in out:
        pytest.skip("the installed IREE runtime has no Vulkan driver")
    assert (tmp_path / "c").read_bytes() == (tmp_path / "python").read_bytes()


def test_a_vulkan_device_is_named_by_its_index_or_a_part_of_its_name(sanitized, tiny_program, tmp_path):
    from fixstep.frontend import compile

    if not IREE_DIR:
        pytest.skip("no IREE runtime is installed (FIXSTEP_IREE_RUNTIME_DIR)")
    found = vulkan._devices()
    if isinstance(found, str):
        pytest.skip(found)
    path = tmp_path / "tiny.fixstep"
    compile(tiny_program, path, targets=["vulkan", "cpu"])

    def opened(*words: str) -> list[str]:
        tool = sanitized / "runtime/native/tests/session_tool"
        return _run(tool, "-", path, "|".join(("open", "1", *words)), "target").splitlines()

    if "no such device" in opened("vulkan")[1]:
        pytest.skip("the installed IREE runtime has no Vulkan driver")
    # A program on the CPU is no better than the CPU.
    assert opened()[:3] == ["ok", "--", "cpu" if all(d.software for d in found) else "vulkan"]
    for device in (str(found[0].index), found[0].name.upper(), found[-1].name[2:8].lower()):
        assert opened("vulkan", device)[:3] == ["ok", "--", "vulkan"]
    for device in ("nonesuch", str(len(found))):
        with pytest.raises(FixstepError) as caught:
            load(path, target="vulkan", device=device)
        assert f"error 6 {caught.value}".replace("\n  ", "\n").splitlines() == opened("vulkan", device)[:2]


# What a machine may have: devices of Vulkan and of CUDA, each a name and what IREE prints of it.
FEATURES = "features: storageBuffer8BitAccess=yes storageBuffer16BitAccess=yes shaderInt8=yes shaderFloat16=yes"
PROGRAM = ("llvmpipe (LLVM)", f"type: cpu {FEATURES}")
OLD_GPU = ("GeForce 600", "type: discrete-gpu features: storageBuffer16BitAccess=yes shaderInt8=no")
NEW_GPU = ("Radeon 7900", f"type: discrete-gpu {FEATURES}")
TURING, HOPPER = ("Tesla T4", "gpu-compute-capability: 7.5"), ("H200", "gpu-compute-capability: 9.0")
MACHINES = {
    "no driver": {},
    "a program": {"vulkan": [PROGRAM]},
    "an old GPU beside it": {"vulkan": [PROGRAM, OLD_GPU]},
    "old GPUs": {"vulkan": [OLD_GPU, OLD_GPU], "cuda": [TURING]},
    "new ones beside others": {"vulkan": [PROGRAM, OLD_GPU, NEW_GPU], "cuda": [TURING, HOPPER]},
}
REQUIREMENTS = {
    "bytes": {"types": ["f16", "f32", "i8"], "longest_loop": 65_535},
    "a long sum": {"types": ["f32"], "longest_loop": 65_536},
}


@pytest.mark.parametrize("required", REQUIREMENTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_targets_and_devices_are_chosen_as_python_chooses_them(
    sanitized, tiny_artifact, tmp_path, monkeypatch, machine, required
):
    # Drivers list devices that are made up, and none of them opens, so that all are tried until the CPU's turn comes.
    for module, made in ((vulkan, _vulkan_device), (cuda, _cuda_device)):
        family = module.__name__.rpartition(".")[2]
        found = tuple(made(i, *device) for i, device in enumerate(MACHINES[machine].get(family, ())))
        monkeypatch.setattr(module, "_devices", lambda f=family, d=found: d or f"there is no driver of {f}")
        monkeypatch.setattr(module, "opened", _does_not_open)
    lines = [f"{family}|{name}|{said}" for family, found in MACHINES[machine].items() for name, said in found]
    artifact = Artifact.open(tiny_artifact)
    requires = {"cpu": {}, "vulkan": REQUIREMENTS[required], "cuda": {"compute_capability": 80}}
    targets = [
        {**artifact.manifest["targets"][0], "text": text, "requires": requires[text.partition(":")[0]]}
        for text in ("cpu", "vulkan", "cpu:host", "cuda:sm_80", "vulkan:rdna3", "cuda")
    ]
    members = {name: artifact.member(name) for name in artifact.manifest["members"]}
    path = tmp_path / "made-up"
    path.write_bytes(container(pairs({**artifact.manifest, "targets": targets}, members)))
    tool = sanitized / "runtime/native/tests/session_tool"
    for device in (None, "0", "01", "7", "LL", "geF", "none such"):
        for target in (None, "vulkan", "cuda"):
            command = f"open|1|{target or ''}{'' if device is None else f'|{device}'}"
            out = _run(tool, RUN_MODULE, path, command, "target", FIXSTEP_TEST_DEVICES="\n".join(lines))
            try:
                choice = load(path, target=target, device=device).choice
                expected = "\n".join(["ok", "--", choice.target, *choice.passed_over, "--", ""])
            except FixstepError as exc:
                expected = f"error 6 {exc}\n--\n".replace("\n  ", "\n")
            assert out == expected, command


def _vulkan_device(index: int, name: str, said: str) -> vulkan._Device:
    return vulkan._Device(index, index, name, "type: cpu" in said, frozenset(re.findall(r"(\w+)=yes", said)))


def _cuda_device(index: int, name: str, said: str) -> cuda._Gpu:
    return cuda._Gpu(index, index, name, round(10 * float(said.rpartition(" ")[2])))


def _does_not_open(family: str, device_id: int) -> None:
    raise TargetError(f"device {device_id} of {family} does not open")


def test_a_failed_step_leaves_the_state_as_it_was(native, batch_files, tmp_path):
    # The third call fails: init and one step succeed before it.
    script = tmp_path / "run-module"
    script.write_text(f'#!/bin/sh\necho >> {tmp_path}/calls\n[ $(wc -l < {tmp_path}/calls) = 3 ] && exit 1\n'
                      f'exec {RUN_MODULE} "$@"\n')  # fmt: skip
    script.chmod(0o755)
    step = f"call|step|{batch_files[0]}"
    out = native(
        "open|1", step, "leaf|w", step, "leaf|w", "steps", "average|step|loss", step, "steps", run_module=script
    )
    assert out[3] == "error 7 the device failed in step: iree-run-module failed; the state is unchanged"
    assert out[2] == out[4]
    assert (out[5], out[8]) == ("1", "2")


def test_rollback_takes_one_step_back(native, batch_files):
    out = native(
        "open|1", f"call|step|{batch_files[0]}", "leaf|w", "average|step|loss", f"call|step|{batch_files[1]}",
        "rollback", "leaf|w", "average|step|loss", "steps", "rollback",
    )  # fmt: skip
    assert out[2:4] == out[6:8]
    assert out[8] == "1"
    assert out[9].startswith("error 1 there is no step to take back")


def test_a_folder_of_checkpoints(native, batch_files, tmp_path):
    folder = tmp_path / "made" / "here"
    step, save = f"call|step|{batch_files[0]}", f"save_in|{folder}|2"
    assert native("open|1", f"latest|{folder}")[1] == "none \nok"
    native("open|1", step, save, step, save, step, save)
    assert sorted(p.name for p in folder.iterdir()) == [f"step-0000000{n}.safetensors" for n in (2, 3)]
    newest = folder / "step-00000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    found = native("open|1", f"latest|{folder}", "steps")
    assert found[2] == "2"
    assert "passed over   " + str(newest) in found[1]
    (folder / "step-00000002.safetensors").write_bytes(b"")
    assert "no checkpoint in the folder can be read" in native("open|1", f"latest|{folder}")[1]


def test_what_is_refused(native, tiny_artifact, tmp_path):
    other = CORPUS / "checkpoint-whole"
    session = load(tiny_artifact)
    out = native("open|1", f"restore|{other}", "save|/nowhere/a|{}", f"save|{tmp_path}/a|[1]", "reset|init")
    with pytest.raises(FixstepError) as caught:
        session.restore(other)
    assert out[1].splitlines()[0].replace("error 5 ", "") == str(caught.value).splitlines()[0]
    with pytest.raises(FixstepError) as caught:
        session.save("/nowhere/a")
    folder = "Make its folder first. What was there before is unchanged."
    assert out[2] == f"error 5 /nowhere/a: cannot write it: No such file or directory. {folder}"
    assert str(caught.value).startswith("/nowhere/a: cannot write it: No such file or directory. ")
    assert out[3] == "error 1 position: expected one JSON object"
    assert native("open|1|abacus")[0] == "error 6 the artifact has no code for target 'abacus'; it was compiled for cpu"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """A folder with the digits as data and as an artifact."""
    from examples.digits import program
    from fixstep.frontend import compile

    folder = tmp_path_factory.mktemp("digits")
    _run(sys.executable, ROOT / "examples/digits_data.py", folder)
    compile(program, folder / "digits.fixstep", targets=["cpu"])
    return folder


def test_fixstep_train_learns_the_digits_as_python_does_and_resumes(plain, digits, tmp_path):
    train = plain / "runtime/native/tests/train_on_run_module"
    seed = 2**40 + 3

    def run(folder: Path, epochs: int) -> list[str]:
        return _run(
            train, digits / "digits.fixstep", "--data", digits / "digits-train.npz", "--validate",
            digits / "digits-test.npz", "--epochs", str(epochs), "--checkpoint-dir", folder, "--keep", "1",
            "--seed", str(seed), IREE_RUN_MODULE=str(RUN_MODULE),
        ).splitlines()  # fmt: skip

    whole = run(tmp_path / "whole", 8)
    assert whole[0] == "digits on cpu, 57 examples left out"
    assert float(whole[-1].split("validation:  accuracy ")[1].split()[0]) >= 0.97
    run(tmp_path / "resumed", 3)
    assert run(tmp_path / "resumed", 8)[1:] == ["resumed after 69 steps", *whole[4:]]
    name = "step-00000184.safetensors"
    assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

    session = load(digits / "digits.fixstep", target="cpu", seed=seed)
    Loop(session).run(ArrayData(load_npz(digits / "digits-train.npz"), 60, seed=seed), epochs=8)
    state = session.state()

    # A run that Python began and left within its second epoch.
    begun = load(digits / "digits.fixstep", target="cpu", seed=seed)
    data = ArrayData(load_npz(digits / "digits-train.npz"), 60, seed=seed)
    for batch in [*data.batches(1), *data.batches(2)][:30]:
        begun.step(batch)
    (tmp_path / "begun").mkdir()
    begun.save(tmp_path / "begun" / "step-00000030.safetensors")
    assert run(tmp_path / "begun", 8)[1] == "resumed after 30 steps"
    begun.restore(tmp_path / "begun" / name)
    assert {path: leaf.tobytes() for path, leaf in begun.state().items()} == {
        path: leaf.tobytes() for path, leaf in state.items()
    }

    session.restore(tmp_path / "whole" / name)
    assert session.steps == 184
    assert {path: leaf.tobytes() for path, leaf in session.state().items()} == {
        path: leaf.tobytes() for path, leaf in state.items()
    }


@pytest.fixture
def both(sanitized, tmp_path):
    """Train with C, and with Python: each takes options and gives what it printed; and the folder where both run."""

    def train(*options: str, artifact: Path) -> str:
        command = [sanitized / "runtime/native/tests/train_on_run_module", artifact, "--data", "train.npz", *options]
        return _output(*command, cwd=tmp_path, IREE_RUN_MODULE=str(RUN_MODULE))

    def run(*options: str, artifact: Path) -> str:
        command = [Path(sys.executable).parent / "fixstep", "run", artifact, "--data", "train.npz", *options]
        return _output(*command, cwd=tmp_path)

    return train, run, tmp_path


def _output(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment}
    )
    assert done.returncode in (0, 2), f"{command}\n{done.stdout}\n{done.stderr}"
    printed = done.stdout + done.stderr
    return printed if done.returncode == 0 else "refused: " + re.sub("^fixstep(: error|-train): ", "", done.stderr)


def _save_examples(path: Path, count: int, *, outputs: tuple[int, ...] = (3,), bad: int | None = None) -> None:
    rng = np.random.default_rng(count)
    x, y = rng.standard_normal((count, 4)), rng.standard_normal((count, *outputs))
    if bad is not None:
        x[bad] = np.nan
    np.savez(path, x=x.astype(np.float32), y=y.astype(np.float32))


def _held(checkpoint: Path) -> tuple[dict[str, bytes], dict[str, object]]:
    """The state and the position of a checkpoint, without the states of Python's handlers."""
    read = read_checkpoint(checkpoint)
    caller = {key: value for key, value in read.position["caller"].items() if key != "handlers"}
    return {path: leaf.tobytes() for path, leaf in read.leaves.items()}, {**read.position, "caller": caller}


@pytest.mark.parametrize("name", ["tiny", "any"])
def test_a_run_goes_from_program_to_program(both, tiny_artifact, any_size, name):
    train, run, folder = both
    artifact, outputs = {"tiny": (tiny_artifact, (3,)), "any": (any_size, ())}[name]
    # Of the artifact for any size the short last batch trains too; 37 and 19 examples have one of 5 and of 3.
    _save_examples(folder / "train.npz", 37, outputs=outputs)
    _save_examples(folder / "test.npz", 19, outputs=outputs)
    options = ("--validate", "test.npz", "--seed", str(2**64 - 1), "--checkpoint-dir")
    train(*options, "mixed", "--epochs", "1", artifact=artifact)
    assert "  validation: loss " in run(*options, "mixed", "--epochs", "2", "--resume", artifact=artifact)
    last = train(*options, "mixed", "--epochs", "3", artifact=artifact)
    whole = train(*options, "c", "--epochs", "3", artifact=artifact)
    run(*options, "python", "--epochs", "3", artifact=artifact)
    assert last.splitlines()[2:] == whole.splitlines()[3:]
    newest = max((folder / "c").iterdir()).name
    assert newest == {"tiny": "step-00000012.safetensors", "any": "step-00000009.safetensors"}[name]
    assert _held(folder / "mixed" / newest) == _held(folder / "python" / newest)
    assert (folder / "mixed" / newest).read_bytes() == (folder / "c" / newest).read_bytes()


def test_c_goes_on_after_batches_that_python_skipped(both, tiny_artifact):
    train, run, folder = both
    _save_examples(folder / "train.npz", 48, bad=8)  # its second batch
    options = ("--no-shuffle", "--epochs", "2", "--checkpoint-dir")
    skip = ("--watch", "loss", "--on-nonfinite", "skip")
    run(*options, "python", *skip, artifact=tiny_artifact)
    run(*options, "mixed", *skip, "--max-steps", "7", "--early-stop", "loss", artifact=tiny_artifact)
    printed = train(*options, "mixed", artifact=tiny_artifact)
    assert "resumed after 7 steps" in printed
    assert printed.endswith("\nfixstep-train: the checkpoint's state of EarlyStop is dropped: no such handler\n")
    newest = "step-00000010.safetensors"
    held = _held(folder / "mixed" / newest)
    assert held == _held(folder / "python" / newest)
    assert held[1]["caller"]["iteration"] == 12
    assert held[1]["caller"]["skipped"] == 2


def test_c_refuses_other_data_as_python_does(both, any_size):
    train, run, folder = both
    _save_examples(folder / "train.npz", 32, outputs=())
    options = ("--epochs", "2", "--checkpoint-dir", "a")
    train(*options[2:], artifact=any_size)
    before = [path.read_bytes() for path in (folder / "a").iterdir()]
    refusals = [train(*options, *more, artifact=any_size) for more in (["--seed", "5"], ["--batch-size", "8"])]
    assert refusals[0] == (
        "refused: the data is not that of the checkpoint, so the run would not be the same:\n"
        "  seed: expected 0, got 5\n"
        "Resume a/step-00000002.safetensors with the data that the run began with.\n"
    )
    assert "\n  batch_size: expected 16, got 8\n" in refusals[1]
    _save_examples(folder / "train.npz", 37, outputs=())
    refusals.append(train(*options, "--no-shuffle", artifact=any_size))
    assert refusals[2] == run(*options, "--no-shuffle", "--resume", artifact=any_size)
    for line in ("drop_last: expected True, got False", "examples: expected 32, got 37", "shuffle: expected True"):
        assert f"\n  {line}" in refusals[2]
    assert [path.read_bytes() for path in (folder / "a").iterdir()] == before


@pytest.mark.parametrize("asked", ["0", "1", "3", "17", "99"])
@pytest.mark.parametrize("name", ["tiny", "any"])
def test_c_refuses_a_batch_size_as_python_does(both, tiny_artifact, any_size, name, asked):
    train, run, folder = both
    _save_examples(folder / "train.npz", 32, outputs=(3,) if name == "tiny" else ())
    said = {"tiny": "the artifact takes 8 alone", "any": "the artifact takes 2 to 16, multiples of 1"}[name]
    refusals = [command("--batch-size", asked, artifact={"tiny": tiny_artifact, "any": any_size}[name])
                for command in (train, run)]  # fmt: skip
    if asked == "0":
        assert refusals[0].startswith("refused: Usage: fixstep-train ARTIFACT")
    elif (name, asked) == ("any", "3"):
        assert not [text for text in refusals if text.startswith("refused")]
    else:
        assert refusals == [f"refused: --batch-size {asked}: {said}\n"] * 2


ABSENT = object()
ODD = [
    ("epoch", ABSENT, "expected an integer from 1, got nothing"),
    ("epoch", 0, "expected an integer from 1, got 0"),
    ("batch", "1", 'expected an integer from 0, got "1"'),
    ("batch", 5, "expected no more than an epoch has, got 5"),
    ("iteration", 2**63, "expected an integer from 0, got"),
    ("skipped", -1, "expected an integer from 0, got -1"),
    ("skipped_in_epoch", 1.5, "expected an integer from 0, got 1.5"),
    ("skipped_in_a_row", None, "expected an integer from 0, got null"),
    ("validated_at", -2, "expected an integer from -1, got -2"),
    ("halting", 1, "expected true or false, got 1"),
    ("begun", {}, "expected true or false, got {}"),
    ("averages", [], "expected an object, got []"),
    ("averages", {"loss": 1}, 'expected texts such as 0x1.8000000000000p+1, got {"loss":1}'),
    ("validation", {"loss": "0x1." + 9999 * "0"}, "expected texts such as"),
    ("data", "é" * 99, "expected an object, got"),
    ("handlers", [[]], "expected an object, got [[]]"),
]


def test_c_refuses_an_odd_position(both, tiny_artifact):
    train, _, folder = both
    _save_examples(folder / "train.npz", 32)
    train("--checkpoint-dir", "good", artifact=tiny_artifact)
    session = load(tiny_artifact)
    position = session.restore(folder / "good" / "step-00000004.safetensors")
    (folder / "odd").mkdir()
    for key, value, message in ODD:
        changed = {**position, key: value}
        session.save(
            folder / "odd/step-00000004.safetensors",
            position={key: value for key, value in changed.items() if value is not ABSENT},
        )
        got = train("--checkpoint-dir", "odd", "--epochs", "2", artifact=tiny_artifact)
        start = "refused: odd/step-00000004.safetensors: holds no position of a loop: "
        assert got.startswith(f"{start}{key}: {message}"), got
        assert got.endswith(". Move it elsewhere to go on from the checkpoint before it, or choose another folder.\n")


@pytest.mark.parametrize("name", ["no.npz", "x.npz", "short.npz", "fortran.npz", "objects.npz", "text.npz"])
def test_data_that_does_not_fit_is_refused_by_name(native, tmp_path, name):
    batch = tiny_batch()
    np.savez(tmp_path / "x.npz", x=batch["x"])
    np.savez(tmp_path / "short.npz", x=batch["x"][:7], y=batch["y"][:7])
    np.savez(tmp_path / "fortran.npz", x=np.asfortranarray(batch["x"]), y=batch["y"])
    np.savez(tmp_path / "objects.npz", x=np.array([None] * 8), y=batch["y"])
    (tmp_path / "text.npz").write_text("not an archive")
    expected = {
        "no.npz": "absent, damaged, or not a .npz file",
        "x.npz": "y: missing",
        "short.npz": "7 examples do not fill one batch of 8",
        "fortran.npz": "x: damaged, or no plain array: its elements stand column by column",
        "objects.npz": "x: damaged, or no plain array: its elements are no little-endian numbers",
        "text.npz": "absent, damaged, or not a .npz file",
    }[name]
    assert native("open|0", f"call|step|{tmp_path / name}")[1].startswith(f"error 8 {tmp_path / name}: {expected}")


@pytest.fixture(scope="session")
def installed(plain, tmp_path_factory) -> Path:
    """The folder where the library was installed."""
    folder = tmp_path_factory.mktemp("installed")
    built = plain
    if IREE_DIR:
        options = ("-DFIXSTEP_WITH_IREE=ON", f"-DIREERuntime_DIR={IREE_DIR}")
        built = _build(tmp_path_factory.mktemp("native") / "on-iree", *options)
    _run("cmake", "--install", built, "--prefix", folder)
    return folder


def test_the_example_builds_from_an_installed_package(installed, digits, tmp_path):
    source, build = tmp_path / "c", tmp_path / "build"
    shutil.copytree(ROOT / "examples/c", source)
    _run(
        "cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={installed}", f"-DDIGITS_FOLDER={ROOT}",
        f"-DFIXSTEP_COMMAND={Path(sys.executable).parent / 'fixstep'}", f"-DIREERuntime_DIR={IREE_DIR}",
    )  # fmt: skip
    _run("cmake", "--build", build)
    command = [build / "digits", digits / "digits-train.npz", digits / "digits-test.npz", tmp_path / "checkpoints"]
    if IREE_DIR:
        assert float(_run(*command).rsplit(maxsplit=1)[1]) >= 0.97
        session = load(build / "digits.fixstep")
        session.restore(max((tmp_path / "checkpoints").iterdir()))
        assert session.steps == 460
    else:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert "built without IREE" in done.stderr


def test_pkg_config_names_what_a_program_needs(installed, tmp_path):
    folder = next(installed.rglob("fixstep.pc")).parent
    flags = _run("pkg-config", "--cflags", "--libs", "--static", "fixstep", PKG_CONFIG_PATH=str(folder)).split()
    if IREE_DIR:
        pytest.skip("IREE has no file for pkg-config")
    _run("cc", ROOT / "runtime/native/tests/test_header.c", "-o", tmp_path / "program", *flags)
    _run(tmp_path / "program")


def test_the_program_of_the_page_compiles(installed, tiny_artifact, tmp_path):
    (code,) = re.findall(r"```c\n(.*?)```", (ROOT / "docs/native.md").read_text(), re.DOTALL)
    (tmp_path / "main.c").write_text(code)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(page C)\nfind_package(fixstep REQUIRED)\n"
        "add_executable(page main.c)\ntarget_compile_options(page PRIVATE -Wall -Wextra -Werror)\n"
        "target_link_libraries(page PRIVATE fixstep::fixstep)\n"
    )
    build = tmp_path / "build"
    _run("cmake", "-B", build, f"-DCMAKE_PREFIX_PATH={installed}", f"-DIREERuntime_DIR={IREE_DIR}", cwd=tmp_path)
    _run("cmake", "--build", build)
    shutil.copy(tiny_artifact, tmp_path / "tiny.fixstep")
    batches = [tiny_batch(seed) for seed in range(5)]
    np.savez(tmp_path / "train.npz", **{k: np.concatenate([b[k] for b in batches]) for k in ("x", "y")})
    done = subprocess.run([build / "page"], capture_output=True, text=True, cwd=tmp_path)
    if IREE_DIR:
        session = load(tiny_artifact)
        for batch in batches:
            session.step(batch)
        assert done.stdout == f"mean loss {session.averages()['loss']:.6g}\n"
        session.restore(tmp_path / "tiny.safetensors")
        assert session.steps == 5
    else:
        assert done.returncode == 1
        assert done.stderr.startswith("this library was built without IREE")
