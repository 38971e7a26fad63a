"""Batches of any size: one symbolic dimension, a few compiled sizes, and a mask for what lies between."""

import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fixstep import targets
from fixstep.frontend import Program, compile, infer_template, verify_artifact
from fixstep.frontend.sizes import Masker, size_range
from fixstep.runtime import ArrayData, Artifact, Loop, load
from fixstep.targets.errors import ArtifactError, CompileError, FixpointError, ProgramError, TemplateError

PRESENT = [name for name in targets.families() if targets.parse(name).unavailable({}) is None]


def symbol(*constraints, name="b"):
    return jax.export.symbolic_shape(name, constraints=constraints)[0]


def examples(b, dtype="float32"):
    return {"x": jax.ShapeDtypeStruct((b, 6), dtype), "y": jax.ShapeDtypeStruct((b,), "int32")}


def data(n, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((n, 6)).astype("f4"), "y": rng.integers(0, 4, n).astype("i4")}


def batch_norm(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)


def cross_entropy(w, batch):
    return optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, batch["y"]).mean()


def attention_over_the_examples(x):
    return jax.nn.softmax(x @ x.T / 3.0) @ x


def running_total(x):
    return jax.lax.scan(lambda total, row: (total + row, total), jnp.zeros(6), x)


def halved_until_small(x):
    return jax.lax.while_loop(lambda v: jnp.max(jnp.abs(v)) > 0.1, lambda v: v / 2, x)


def convolved(x):
    image = jnp.tile(x[:, :, None, None], (1, 1, 6, 2))
    kernel = jnp.linspace(-1, 1, 36).reshape(3, 3, 2, 2)
    numbers = ("NHWC", "HWIO", "NHWC")
    loss = lambda k: (jax.lax.conv_general_dilated(image, k, (1, 1), "SAME", dimension_numbers=numbers) ** 2).mean()  # noqa: E731
    return jax.value_and_grad(loss)(kernel)


# What a step does with the examples of a batch: each at every size as JAX at that very size.
KINDS = {
    "mean": lambda x, y: x.mean(),
    "mean_and_variance": lambda x, y: batch_norm(x),
    "gradient_of_cross_entropy": lambda x, y: jax.value_and_grad(cross_entropy)(
        jnp.linspace(-1, 1, 24).reshape(6, 4), {"x": x, "y": y}
    ),
    "gradient_through_batch_norm": lambda x, y: jax.grad(lambda w: (batch_norm(jnp.sin(x * w)) ** 3).mean())(
        jnp.ones(6)
    ),
    "sum_of_integers": lambda x, y: y.sum(),
    "product": lambda x, y: jnp.prod(x),
    "largest_and_smallest": lambda x, y: (x.max(0), x.min(0), jnp.argmax(x, 0), jnp.argmin(x[:, 0])),
    "any_and_all": lambda x, y: (jnp.any(x > 2), jnp.all(x > -9)),
    "logsumexp": lambda x, y: jax.nn.logsumexp(x, axis=0),
    "gram_matrix": lambda x, y: x.T @ x,
    "attention_over_the_examples": lambda x, y: attention_over_the_examples(x),
    "sorted": lambda x, y: jnp.sort(x, axis=0),
    "ranked": lambda x, y: jnp.argsort(x[:, 0]),
    "running_sum": lambda x, y: jnp.cumsum(x, axis=0),
    "running_sum_from_the_end": lambda x, y: jnp.cumsum(x[::-1], axis=0),
    "reversed": lambda x, y: x[::-1],
    "last_example": lambda x, y: x[-1],
    "all_but_the_first": lambda x, y: x[1:],
    "second_half": lambda x, y: x[x.shape[0] // 2 :],
    "chosen_by_index": lambda x, y: x[y],
    "chosen_out_of_range": lambda x, y: jnp.take(x, y + 60, axis=0, mode="clip"),
    "chosen_out_of_range_with_a_fill": lambda x, y: jnp.take(x, y * 40, axis=0, mode="fill", fill_value=7.0),
    "counted": lambda x, y: jnp.zeros(4, jnp.int32).at[y].add(1),
    "set_by_index": lambda x, y: jnp.zeros((4, 6)).at[y].max(x),
    "embedded_and_back": lambda x, y: jax.grad(lambda e: (e[y] * x).sum())(jnp.ones((4, 6))),
    "flattened": lambda x, y: x.reshape(-1)[:3],
    "with_an_axis_more": lambda x, y: x.reshape(x.shape[0], 2, 3).sum((0, 1)),
    "padded_by_one": lambda x, y: jnp.pad(x, ((1, 1), (0, 0)), constant_values=2.0).sum(0),
    "random": lambda x, y: (x + jax.random.normal(jax.random.key(3), x.shape)).sum(0),
    "dropped_out": lambda x, y: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x, 0.0),
    "keys_for_each": lambda x, y: jax.vmap(lambda k: jax.random.normal(k))(
        jax.random.split(jax.random.key(0), x.shape[0])
    ),
    "scanned": lambda x, y: running_total(x),
    "scanned_backward": lambda x, y: jax.lax.scan(lambda c, r: (c * 0.5 + r, c), jnp.zeros(6), x, reverse=True),
    "while": lambda x, y: halved_until_small(x),
    "counted_up_to_the_size": lambda x, y: jax.lax.fori_loop(0, x.shape[0], lambda i, t: t + x[i, 0], 0.0),
    "cond": lambda x, y: jax.lax.cond(x.mean() > 0, lambda v: v.sum(0), lambda v: v.max(0), x),
    "convolved": lambda x, y: convolved(x),
    "solved_for_each": lambda x, y: jnp.linalg.cholesky(jnp.eye(3) + x[:, :3, None] * x[:, None, :3]).sum(0),
    "cumulative_within_each": lambda x, y: (jnp.cumprod(jnp.tanh(x), 1), jax.lax.associative_scan(jnp.add, x, axis=1)),
    "stacked": lambda x, y: jnp.stack([x, x + 1], axis=1).sum(0),
    "checkpointed": lambda x, y: jax.grad(lambda w: jax.checkpoint(lambda v: jnp.sin(v * w).mean())(x))(2.0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_gives_what_jax_gives_at_the_real_size(kind):
    function = KINDS[kind]
    b = symbol("b >= 2", "b <= 64")
    found = size_range({"batch": examples(b)})
    closed, tree = jax.make_jaxpr(lambda batch: function(batch["x"], batch["y"]), return_shape=True)(examples(b))
    for padded, sizes in ((64, (63,)), (16, (16,)), (4, (3, 2))):
        masked = jax.jit(lambda x, y, n, p=padded: Masker(found, p, n).evaluate(closed.jaxpr, closed.consts, [x, y]))
        for size in sizes:
            real = data(size)
            # Whatever stands behind the real examples must not matter.
            x, y = np.full((padded, 6), np.nan, "f4"), np.full(padded, 3, "i4")
            x[:size], y[:size] = real["x"], real["y"]
            got = masked(x, y, np.int32(size))
            wanted = jax.tree.leaves(jax.jit(lambda batch: function(batch["x"], batch["y"]))(real))
            for ours, theirs, struct in zip(got, wanted, jax.tree.leaves(tree), strict=True):
                part = tuple(slice(n) for n in theirs.shape)
                assert ours.dtype == theirs.dtype == struct.dtype
                # Sums in another order, and products of up to 384 factors.
                np.testing.assert_allclose(ours[part], theirs, rtol=2e-5, atol=2e-5, err_msg=f"{size} of {padded}")


REFUSED = {
    "joined": (lambda x, y: jnp.concatenate([x, x]), "concatenate cannot be compiled for a batch of any size"),
    "mixed": (lambda x, y: x.T.reshape(-1), "puts padding between the examples"),
    "a_matrix_of_examples": (lambda x, y: jnp.linalg.cholesky(x @ x.T), "it mixes the examples"),
    "other_keys": (
        lambda x, y: jax.random.normal(jax.random.key(0, impl="rbg"), x.shape),
        "with keys of rbg the numbers of a small batch are others",
    ),
    "random_along_another_axis": (
        lambda x, y: jax.random.normal(jax.random.key(0), (6, x.shape[0])),
        "make the batch their first axis",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_mask_cannot_undo_is_refused_with_its_line(kind, tmp_path):
    function, message = REFUSED[kind]
    program = Program(
        init={"w": np.float32(0)},
        step=lambda state, batch: (state, {"loss": function(batch["x"], batch["y"]).sum()}),
        batch=examples(symbol("b <= 64")),
    )
    with pytest.raises(CompileError, match=message) as caught:
        compile(program, tmp_path / "a.fixstep")
    assert f"{__name__}.py:" in str(caught.value)
    assert not (tmp_path / "a.fixstep").exists()


@pytest.mark.parametrize(
    ("constraints", "compiled", "low"),
    [
        (["b <= 64"], (64, 16, 4), 1),
        (["b <= 3"], (3, 1), 1),
        (["b == 5"], (5,), 5),
        (["b >= 20", "b <= 100"], (100, 25, 20), 20),
        (["b <= 64", "mod(b, 8) == 0"], (64, 16, 8), 8),
    ],
)
def test_the_range_and_the_sizes_of_a_symbol(constraints, compiled, low):
    b = symbol(*constraints)
    if isinstance(b, int):
        pytest.skip("JAX gives a number for it")
    found = size_range({"batch": jax.ShapeDtypeStruct((b,), "float32")})
    assert (found.compiled, found.low) == (compiled, low)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": (symbol(), 6)}, r"the dimension b has no upper bound.*constraints=\['b <= 64'\]"),
        ({"x": (2 * symbol("b <= 9"), 6)}, r"x: expected numbers and one name in the shape, got 2\*b"),
        (
            {"x": (symbol("b <= 9"),), "y": (symbol("c <= 9", name="c"),)},
            "one symbolic dimension, got several: b, c; give the others numbers",
        ),
    ],
)
def test_a_batch_that_says_too_little_or_too_much_of_its_size(shapes, message):
    batch = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    with pytest.raises(ProgramError, match=message):
        Program(init={"w": np.float32(0)}, step=lambda state, batch: (state, {}), batch=batch)


def test_a_state_that_takes_the_size_of_the_batch_is_refused():
    program = Program(
        init={"w": np.zeros(8, "f4")},
        step=lambda state, batch: ({"w": batch["x"].sum(1)}, {}),
        batch=examples(symbol("b <= 8")),
    )
    with pytest.raises(FixpointError, match=r"these leaves get the size of the batch, b:\n  w: shape \(b\)"):
        infer_template(program)


def classifier(b):
    def init(key):
        w = jax.random.normal(key, (6, 4))
        return {"w": w, "opt": optax.adam(1e-2).init(w), "mean": jnp.zeros(6), "seen": jnp.int32(0)}

    def step(state, batch):
        loss, grad = jax.value_and_grad(cross_entropy)(state["w"], batch)
        updates, opt = optax.adam(1e-2).update(grad, state["opt"])
        mean = 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)
        new = {"w": state["w"] + updates, "opt": opt, "mean": mean, "seen": state["seen"] + batch["x"].shape[0]}
        each = jnp.argmax(batch["x"] @ state["w"], 1)
        return new, {
            "loss": loss,
            "right": jnp.mean(each == batch["y"]),
            "each": each,
            "size": jnp.int32(0) + each.shape[0],
        }

    return Program(
        name="classifier",
        init=init,
        step=step,
        evaluate=lambda state, batch: {"loss": cross_entropy(state["w"], batch)},
        predict=lambda state, inputs: inputs @ state["w"],
        batch=examples(b),
        inputs=jax.ShapeDtypeStruct((b, 6), "float32"),
    )


@pytest.fixture(scope="module")
def any_size(tmp_path_factory):
    path = tmp_path_factory.mktemp("sizes") / "any.fixstep"
    compile(classifier(symbol("b <= 64")), path, targets=PRESENT)
    return path


@pytest.mark.parametrize("target", PRESENT)
def test_a_run_over_many_sizes_is_that_of_jax(any_size, target):
    session = load(any_size, target=target)
    program = classifier(64)
    step, evaluate = jax.jit(program.step), jax.jit(program.evaluate)
    state = jax.jit(program.init)(jax.random.key(0))
    state["w"] = jnp.asarray(session.state()["w"])
    total = count = 0
    for seed, size in enumerate((64, 63, 17, 16, 5, 1, 64)):
        batch = data(size, seed)
        metrics = session.step(batch)
        state, wanted = step(state, batch)
        assert int(metrics["size"]) == size
        np.testing.assert_allclose(float(metrics["loss"]), float(wanted["loss"]), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(metrics["each"].numpy(), wanted["each"])
        outputs = session.predict({"": batch["x"]})["output"]
        np.testing.assert_allclose(outputs, batch["x"] @ np.asarray(state["w"]), rtol=1e-5, atol=1e-5)
        held_out = session.evaluate(batch)
        np.testing.assert_allclose(float(held_out["loss"]), float(evaluate(state, batch)["loss"]), rtol=1e-5, atol=1e-6)
        total, count = total + float(wanted["loss"]) * size, count + size
    np.testing.assert_allclose(session.state()["w"], state["w"], rtol=1e-4, atol=1e-5)
    assert session.state()["seen"] == count
    # A short batch weighs by its examples.
    assert session.averages()["loss"] == pytest.approx(total / count, rel=1e-5)
    assert session.averages()["size"] == pytest.approx((64**2 * 2 + 63**2 + 17**2 + 16**2 + 26) / count)


def test_it_is_verified_at_each_compiled_size(any_size):
    results, _ = verify_artifact(any_size, target="cpu")
    assert results[0].passed
    assert results[0].steps == 4  # 64, 63, 15, 3


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (data(0), r"the batch has 0 examples \(b of x\), expected 1 to 64"),
        (data(65), r"the batch has 65 examples \(b of x\), expected 1 to 64: split it"),
        (
            data(5) | {"y": data(6)["y"]},
            r"y: expected int32\[5\], got int32\[6\]\nb of x is 5, and every leaf needs the same",
        ),
        ({"y": data(5)["y"]}, r"x: expected float32\[5,6\], missing"),
        ({}, r"x: expected float32\[64,6\], missing"),
        (data(5) | {"x": data(5)["x"].astype("f8")}, r"x: expected float32\[5,6\], got float64\[5,6\]"),
        ((1, 2), r"x: expected float32\[64,6\], missing"),
    ],
)
def test_a_batch_that_does_not_fit_says_why(any_size, batch, message):
    session = load(any_size, target="cpu")
    before = session.state()
    with pytest.raises(TemplateError, match=message):
        session.step(batch)
    assert all(before[path].tobytes() == leaf.tobytes() for path, leaf in session.state().items())


def test_the_last_short_batch_of_an_epoch_trains_and_counts(any_size, tmp_path):
    session = load(any_size, target="cpu")
    source = ArrayData(data(100), 64, shuffle=False, drop_last=False)
    Loop(session).run(source, epochs=2)
    assert session.state()["seen"] == 200
    session.save(tmp_path / "c.safetensors")
    other = load(any_size, target="cpu")
    other.restore(tmp_path / "c.safetensors")
    for each in (session, other):
        each.step(data(7))
    assert other.state()["w"].tobytes() == session.state()["w"].tobytes()


def test_constants_are_held_once(tmp_path):
    table = np.random.default_rng(0).standard_normal((100, 100)).astype("f4")

    def step(state, batch):
        return {"w": state["w"] + (jnp.tanh(batch @ table) @ table).mean(0)}, {}

    sizes = {}
    for name, n in (("any", symbol("b <= 64")), ("one", 64)):
        path = tmp_path / name
        batch = jax.ShapeDtypeStruct((n, 100), "float32")
        compile(Program(init={"w": np.zeros(100, "f4")}, step=step, batch=batch), path)
        with zipfile.ZipFile(path) as archive:
            sizes[name] = {info.filename: info.file_size for info in archive.infolist()}
    assert sizes["any"]["program.mlir"] < 1.3 * sizes["one"]["program.mlir"]
    assert sizes["any"]["modules/cpu.vmfb"] < 1.5 * sizes["one"]["modules/cpu.vmfb"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low": 0}, "1 <= low <= high"),
        ({"compiled": [16, 64]}, "falling sizes from 64"),
        ({"compiled": []}, "falling sizes from 64"),
        ({"axes": {"batch": {"x": [1]}}}, "'x' has no axis 1 of 64"),
        ({"axes": {"weights": {}}}, "unknown key 'weights'"),
        ({"high": "64"}, "expected an integer"),
    ],
)
def test_a_manifest_with_impossible_sizes_is_refused(any_size, tmp_path, change, message):
    from fixstep.runtime._artifact import write_artifact

    artifact = Artifact.open(any_size)
    manifest = json.loads(json.dumps(artifact.manifest))
    members = {name: bytes(artifact.member(name)) for name in manifest.pop("members")}
    manifest["sizes"] |= change
    manifest["sizes"]["axes"] = artifact.manifest["sizes"]["axes"] | change.get("axes", {})
    with pytest.raises(ArtifactError, match=message):
        write_artifact(tmp_path / "a.fixstep", manifest, members)
