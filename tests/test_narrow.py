"""Types of less than eight bits and eight-bit floats: their codes, and steps that hold them on every target."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fixstep import targets
from fixstep.frontend import Program, compile
from fixstep.frontend.narrow._codes import INTEGERS, NARROW, decode, encode, narrowed
from fixstep.runtime import load
from fixstep.targets.errors import CompileError, TargetError

PRESENT = [name for name in targets.families() if targets.parse(name).unavailable({}) is None]


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name))


def codes_of(name):
    return np.arange(1 << INTEGERS[name] if name in INTEGERS else 256).astype(np.uint8)


@pytest.mark.parametrize("name", sorted(NARROW))
def test_every_code_is_read_and_written(name):
    dtype, codes = dtype_of(name), codes_of(name)
    wide = codes.view(dtype).astype(np.float32)
    numbers = np.asarray(decode(jnp.asarray(codes), dtype)).astype(np.float32)
    np.testing.assert_array_equal(numbers, wide)
    real = ~np.isnan(wide)
    np.testing.assert_array_equal(np.signbit(numbers[real]), np.signbit(wide[real]))
    back = np.asarray(encode(decode(jnp.asarray(codes), dtype), dtype))
    np.testing.assert_array_equal(back[real], codes[real])
    assert np.isnan(back.view(dtype).astype(np.float32)[~real]).all()


@pytest.mark.parametrize("name", sorted(NARROW))
def test_numbers_are_rounded_as_in_jax(name):
    dtype = dtype_of(name)
    rng = np.random.default_rng(0)
    exact = codes_of(name).view(dtype).astype(np.float64)
    exact = np.sort(exact[np.isfinite(exact)])
    halves = (exact[1:] + exact[:-1]) / 2
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 3e38]
    spread = rng.standard_normal(5000) * np.exp(rng.uniform(-14, 14, 5000))
    x = np.concatenate([exact, halves, special, spread]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    with np.errstate(invalid="ignore"):
        got = np.asarray(jax.jit(lambda v: narrowed(v, dtype).astype(jnp.float32))(x))
        wanted = np.asarray(jax.jit(lambda v: v.astype(dtype).astype(jnp.float32))(x))
    np.testing.assert_array_equal(got, wanted)
    real = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(got[real]), np.signbit(wanted[real]))


def integers(q, x):
    left = jax.lax.shift_right_logical(q, jnp.ones_like(q))
    total = jnp.sum(q.astype(jnp.int32))  # sorting and counting bits is left out: XLA has them wrong below eight bits
    return q * q + q, (q // jnp.full_like(q, 3), left, jnp.clip(q, 1, 3), q > x.astype(q.dtype), total)


def floats(q, x):
    total = (q.astype(jnp.float32) @ x.T).sum()
    return (q * x.astype(q.dtype) - q).astype(q.dtype), (jnp.exp(q), jnp.maximum(q, 0.5), q[::-1], total)


def in_a_loop(q, x):
    def turn(carry, row):
        return (carry + row.astype(carry.dtype)).astype(carry.dtype), carry

    last, rows = jax.lax.scan(turn, q[0], x)
    grown = jax.lax.while_loop(lambda v: v.astype(jnp.float32).max() < 1, lambda v: v + jnp.ones_like(v), q[1])
    chosen = jax.lax.cond(x.mean() > 0, lambda v: v + v, lambda v: -v, q)
    return chosen.at[0].set(last), (rows, grown, jnp.zeros_like(q).at[jnp.array([0, 0, 1])].add(q[:3]))


CASES = {
    **{f"{name}-integers": (name, integers) for name in ("int4", "uint2")},
    **{f"{name}-floats": (name, floats) for name in ("float8_e3m4", "float8_e4m3fn", "float8_e4m3b11fnuz")},
    "int4-in_a_loop": ("int4", in_a_loop),
    "float8_e4m3-in_a_loop": ("float8_e4m3", in_a_loop),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_gives_what_jax_gives(case, tmp_path):
    name, function = CASES[case]
    rng = np.random.default_rng(1)
    state = {"q": rng.integers(-2, 3, (4, 6)).clip(0 if name.startswith("u") else -2).astype(dtype_of(name))}
    batches = [rng.standard_normal((4, 6)).astype(np.float32) for _ in range(3)]

    def step(state, batch):
        new, metrics = function(state["q"], batch)
        return {"q": new}, dict(enumerate(metrics))

    path = tmp_path / "a.fixstep"
    compile(Program(init=state, step=step, batch=batches[0]), path, targets=PRESENT, verify=False)
    for target in PRESENT:
        session, expected = load(path, target=target), {"q": jnp.asarray(state["q"])}
        for batch in batches:
            metrics = session.step(batch)
            expected, wanted = jax.jit(step)(expected, batch)
            for key, value in wanted.items():
                got, theirs = metrics[str(key)].numpy(), np.asarray(value)
                assert got.dtype == theirs.dtype
                # Exponentials differ in the last place, which may be one step of the narrow type.
                close = 0.13 if key == 0 and function is floats else 1e-5
                np.testing.assert_allclose(
                    got.astype("f4"), theirs.astype("f4"), close, 1e-5, err_msg=f"{target} {key}"
                )
            np.testing.assert_array_equal(session.state()["q"], np.asarray(expected["q"]), err_msg=target)
        session.save(tmp_path / "c.safetensors")
        other = load(path, target=target)
        other.restore(tmp_path / "c.safetensors")
        assert other.state()["q"].tobytes() == session.state()["q"].tobytes()


def test_what_looks_at_bits_is_refused_with_its_line(tmp_path):
    program = Program(
        init={"q": np.zeros(4, ml_dtypes.int4)},
        step=lambda state, batch: (state, {"bits": jax.lax.bitcast_convert_type(state["q"].reshape(2, 2), jnp.uint8)}),
        batch=np.zeros(1, np.float32),
    )
    with pytest.raises(CompileError, match=rf"{__name__}\.py:.*\n  it looks at the bits of int4; use a wider type"):
        compile(program, tmp_path / "a.fixstep")


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float6_e2m3fn"])
def test_types_that_nothing_holds_are_refused(name, tmp_path):
    program = Program(
        init={"q": np.zeros(4, dtype_of(name))}, step=lambda state, batch: (state, {}), batch=np.zeros(1, np.float32)
    )
    with pytest.raises(TargetError, match=rf"state q: {name}\[4\]; use float8_e4m3fn"):
        compile(program, tmp_path / "a.fixstep")
