"""Metrics that are read from sums: weighted, exact, and over all calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fixstep.frontend import Program, compile
from fixstep.frontend._sums import ExpRatio, Ratio, Total, add
from fixstep.runtime import load
from fixstep.runtime._metrics import _joined
from fixstep.runtime._signature import LeafSpec

WORDS = LeafSpec("sum/n", "uint32", (2,))


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int32", [2**31 - 1, 2**31 - 1, -5, 7, -(2**31)]),
        ("uint32", [2**32 - 1, 2**32 - 1, 1]),
        ("int64", [2**40, -(2**41), 2**33 + 1]),
        ("uint64", [2**63 - 1, 3, 2**32]),
        ("bool", [True, False, True]),
        ("int8", [-128, 127, -1]),
    ],
)
def test_integers_are_added_up_exactly(dtype, values):
    with jax.enable_x64(True):
        total = jnp.zeros(2, jnp.uint32)
        for value in values:
            total = jax.jit(lambda total, value: add(total, value, WORDS))(total, np.asarray(value, dtype))
    expected = sum(map(int, values))
    assert int(_joined(np.asarray(total))) == (expected if expected < 2**63 else expected - 2**64)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    def metrics(batch):
        return {
            "precision": Ratio(jnp.sum(batch["hits"]), jnp.sum(batch["of"])),
            "mean": Ratio(jnp.sum(batch["x"]), batch["x"].size),
            "perplexity": ExpRatio(jnp.sum(batch["x"]), batch["x"].size),
            "seen": Total(jnp.sum(batch["hits"])),
            "table": Total(batch["hits"][:, None] * batch["of"]),
            "plain": batch["x"][0],
            "number": batch["hits"][0],
        }

    batch = {"x": jax.ShapeDtypeStruct((2,), "float32")}
    batch |= {name: jax.ShapeDtypeStruct((2,), "int32") for name in ("hits", "of")}
    program = Program(
        init={"w": jnp.zeros(2)},
        step=lambda state, batch: (state, metrics(batch)),
        evaluate=lambda state, batch: metrics(batch),
        batch=batch,
    )
    path = tmp_path_factory.mktemp("sums") / "sums.fixstep"
    compile(program, path)
    return load(path)


def batch(x, hits, of):
    return {"x": np.float32(x), "hits": np.int32(hits), "of": np.int32(of)}


@pytest.mark.parametrize("function", ["step", "evaluate"])
def test_ratios_are_those_of_the_sums(session, function):
    session.reset_averages(function)
    first = getattr(session, function)(batch([1, 2], [1, 0], [1, 1]))
    assert float(first["precision"]) == 0.5
    assert float(first["perplexity"]) == pytest.approx(np.exp(1.5))
    assert first["seen"].numpy() == 1
    np.testing.assert_array_equal(first["table"].numpy(), [[1, 1], [0, 0]])
    getattr(session, function)(batch([3, 4], [-2, 3], [5, 3]))
    averages = session.averages(function)
    assert averages.keys() == {"precision", "mean", "perplexity", "seen", "plain", "number"}
    assert averages["precision"] == 2 / 10  # the mean of the two ratios is 0.3125
    assert averages["mean"] == 2.5
    assert averages["perplexity"] == pytest.approx(np.exp(2.5))
    assert (averages["seen"], averages["plain"], averages["number"]) == (2, 2, -0.5)
    totals = session.totals(function)
    assert totals["seen"] == 2
    np.testing.assert_array_equal(totals["table"], [[-9, -5], [15, 9]])
    assert totals["table"].dtype == np.int64


def test_counts_are_exact_where_float32_stops(session):
    session.reset_averages()
    for hits in ([2**24, 0], [1, 0], [1, 0], [1, 0], [2**30, 2**30 - 1], [2**30, 2**30 - 1]):
        session.step(batch([1, 1], hits, [1, 1]))
    assert session.totals()["seen"] == 2**24 + 3 + 2 * (2**31 - 1)
    assert session.averages()["precision"] == (2**24 + 3 + 2 * (2**31 - 1)) / 12


def test_nothing_by_nothing_is_not_a_number(session):
    session.reset_averages()
    assert session.averages() == {}
    metrics = session.step(batch([0, 0], [0, 0], [0, 0]))
    assert np.isnan(float(metrics["precision"]))
    assert np.isnan(session.averages()["precision"])


def test_sums_go_into_a_checkpoint_and_back(session, tmp_path):
    session.reset_averages()
    session.step(batch([1, 2], [1, 0], [1, 1]))
    session.save(tmp_path / "c.safetensors")
    before = session.averages(), session.totals()["table"]
    session.step(batch([3, 4], [-2, 3], [5, 3]))
    session.restore(tmp_path / "c.safetensors")
    assert session.averages() == before[0]
    np.testing.assert_array_equal(session.totals()["table"], before[1])
