"""The handlers that follow a metric, and those that show and log."""

import contextlib
import csv
import io
import json
import math
import sys

import numpy as np
import pytest

from fixstep.runtime import (
    ArrayData,
    Checkpoints,
    EarlyStop,
    HaltOnNonFinite,
    LogLines,
    Loop,
    MetricsLog,
    On,
    Progress,
    ReduceOnPlateau,
    StateNumber,
    TensorBoardLog,
    Throughput,
    every,
    load,
    load_leaves,
    read_checkpoint,
)
from fixstep.runtime._monitor import Monitor
from fixstep.targets.errors import CheckpointError, DataError, TemplateError

RATE = "opt/hyperparams/learning_rate"
NAN, INF = math.nan, math.inf


@pytest.fixture(scope="session")
def told_artifact(tmp_path_factory):
    """A step whose metrics are what the batch says: `loss` in training, `score` in validation; and a learning rate."""
    import jax
    import jax.numpy as jnp
    import optax

    from fixstep.frontend import Program, compile

    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)

    def init(key):
        return {"w": jnp.zeros(2), "opt": optimizer.init(jnp.zeros(2)), "half": jnp.bfloat16(0.5)}

    def step(state, batch):
        updates, opt = optimizer.update(jnp.ones(2), state["opt"])
        return {**state, "w": state["w"] + updates, "opt": opt}, {"loss": batch["value"].sum()}

    program = Program(
        name="told",
        init=init,
        step=step,
        evaluate=lambda state, batch: {"score": batch["value"].sum()},
        batch={"value": jax.ShapeDtypeStruct((1,), "float32")},
    )
    path = tmp_path_factory.mktemp("told") / "told.fixstep"
    compile(program, path, targets=["cpu"])
    return path


@pytest.fixture
def session(told_artifact):
    return load(told_artifact)


class Told:
    """Data whose epoch e has one batch, the e-th of these values."""

    def __init__(self, *values):
        self.values = values

    def batches(self, epoch, start=0):
        return iter([{"value": np.array([self.values[epoch - 1]], np.float32)}][start:])


def train(session, handlers, losses, *, validate=None, **options):
    loop = Loop(session, handlers, on_nonfinite="continue")
    return loop.run(Told(*losses), epochs=len(losses), validate=validate and Told(*validate), **options)


# --- what an improvement is

IMPROVEMENTS = [
    ("min", 0.0, [3, 2, 2, 1], [True, True, False, True]),
    ("max", 0.0, [3, 2, 4, 4], [True, False, True, False]),
    ("min", 0.5, [3, 2.75, 2.5, 2.25, 2.0], [True, False, False, True, False]),
    ("max", 0.5, [1, 1.5, 1.75], [True, False, True]),
    ("min", 0.0, [NAN, 5, NAN, 6, 4, -INF, 3], [False, True, False, False, True, False, True]),
    ("max", 0.0, [NAN, -5, INF, -4], [False, True, False, True]),
]


@pytest.mark.parametrize(("mode", "min_delta", "values", "expected"), IMPROVEMENTS)
def test_nan_is_no_improvement_and_blocks_none(mode, min_delta, values, expected):
    monitor = Monitor("loss", mode=mode, min_delta=min_delta)
    assert [monitor.improves(value) for value in values] == expected


# --- early stop

STOPS = [
    ([5, 4, 4, 4, 3], {"patience": 2}, 4),
    ([5, 4, NAN, 3, NAN, NAN, 2], {"patience": 2}, 6),
    ([NAN, NAN, 3, 2, 1], {"patience": 3}, 5),
    ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max"}, 5),
    ([5, 4.9, 4.8, 4.7], {"patience": 2, "min_delta": 0.15}, 4),
    ([5, 4.9, 4.8, 4.7], {"patience": 2, "min_delta": 0.25}, 3),
]


@pytest.mark.parametrize(("values", "options", "epochs"), STOPS)
@pytest.mark.parametrize("metric", ["loss", "validation/score"])
def test_early_stop(session, values, options, epochs, metric):
    validate = values if metric.startswith("validation") else None
    losses = values if validate is None else [0.0] * len(values)
    result = train(session, [EarlyStop(metric, **options)], losses, validate=validate)
    assert result.epochs == epochs
    assert result.stopped == ("EarlyStop" if epochs < len(values) else result.stopped)


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_early_stop_remembers(told_artifact, tmp_path, stop):
    values = [5, 4, 4, 4, 4, 2]
    for limit in (stop, None):
        handlers = [EarlyStop("loss", patience=3), Checkpoints(tmp_path)]
        result = train(load(told_artifact), handlers, values, max_steps=limit, resume=True)
    assert (result.epochs, result.stopped) == (5, "EarlyStop")


def test_an_early_stop_lasts_and_more_patience_lifts_it(told_artifact, tmp_path):
    values = [5, 4, 4, 4, 3, 2]
    results = [
        train(load(told_artifact), [EarlyStop("loss", patience=patience), Checkpoints(tmp_path)], values, resume=True)
        for patience in (2, 2, 3)
    ]
    assert [(r.epochs, r.stopped) for r in results] == [(4, "EarlyStop"), (4, "EarlyStop"), (6, "finished")]


# --- reduce on plateau


def rates(session, handlers, losses, **options):
    seen = []
    note = On("epoch_completed", lambda state: seen.append(float(state.session.state()[RATE])))
    train(session, [*handlers, note], losses, **options)
    return seen


PLATEAUS = [
    ([5, 5, 5, 5, 5], {"patience": 2, "factor": 0.5}, [0.5, 0.5, 0.25, 0.25, 0.125]),
    ([5, 5, 5, 5, 5], {"patience": 1, "factor": 0.5, "cooldown": 2}, [0.5, 0.25, 0.25, 0.25, 0.125]),
    ([5, 5, 5, 5], {"patience": 1, "factor": 0.5, "minimum": 0.2}, [0.5, 0.25, 0.2, 0.2]),
    ([5, NAN, 4, NAN, NAN, 3], {"patience": 2, "factor": 0.5}, [0.5, 0.5, 0.5, 0.5, 0.25, 0.25]),
    ([1, 2, 3, 3], {"patience": 1, "factor": 0.5, "mode": "max"}, [0.5, 0.5, 0.5, 0.25]),
]


@pytest.mark.parametrize(("losses", "options", "expected"), PLATEAUS)
def test_reduce_on_plateau_sets_a_leaf(session, losses, options, expected):
    assert rates(session, [ReduceOnPlateau(RATE, "loss", **options)], losses) == pytest.approx(expected)
    steps = np.cumsum([0.5, *expected[:-1]])  # the next step trains with what was set
    assert session.state()["w"] == pytest.approx(-np.repeat(steps[-1], 2))


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_reduce_on_plateau_remembers(told_artifact, tmp_path, stop):
    losses, options = [5, 5, 5, 5, 5, 5], {"patience": 1, "factor": 0.5, "cooldown": 1}
    whole = rates(load(told_artifact), [ReduceOnPlateau(RATE, "loss", **options)], losses)
    parts = []
    for limit in (stop, None):
        handlers = [ReduceOnPlateau(RATE, "loss", **options), Checkpoints(tmp_path)]
        parts += rates(load(told_artifact), handlers, losses, max_steps=limit, resume=True)
    assert parts == whole


# --- what is not finite


@pytest.mark.parametrize(
    ("losses", "validate", "options", "steps", "told"),
    [
        ([1, NAN, 1], None, {}, 2, "halts after step 2: loss is nan"),
        ([1, INF, 1], None, {"metrics": ["loss"], "every": 2}, 2, "halts after step 2: loss is inf"),
        ([1, 2, 1], [1, NAN, 1], {}, 2, "halts after step 2: validation/score is nan"),
        ([1, NAN, 1], [1, 1, 1], {"metrics": ["validation/score"]}, 3, ""),
    ],
)
def test_halt_on_what_is_not_finite(session, capfd, losses, validate, options, steps, told):
    result = train(session, [HaltOnNonFinite(**options)], losses, validate=validate)
    assert (result.steps, result.stopped) == (steps, "HaltOnNonFinite" if told else "finished")
    assert told in capfd.readouterr().err


# --- checkpoints


def folders(folder):
    return {name: [int(path.name[5:13]) for path in sorted((folder / name).glob("step-*"))] for name in (".", "best")}


BESTS = [
    ([5, 4, 6, 3, 7, 8], {"keep": 2}, [5, 6], [4]),
    ([5, 4, 6, 3, 7, 8], {"keep": 1, "keep_best": 2}, [6], [2, 4]),
    ([5, NAN, 6, 7], {"keep": 1}, [4], [1]),
    ([NAN, 5, 6, 7], {"keep": 1}, [4], [2]),
    ([5, 6, 4, 7], {"mode": "max", "keep": 1}, [4], [4]),
]


@pytest.mark.parametrize(("losses", "options", "newest", "best"), BESTS)
@pytest.mark.parametrize("stop", [None, 1, 2, 4])
@pytest.mark.parametrize("metric", ["loss", "validation/score"])
def test_the_best_is_kept(told_artifact, tmp_path, losses, options, newest, best, stop, metric):
    validate = losses if metric.startswith("validation") else None
    for limit in (stop, None) if stop else (None,):
        handlers = [Checkpoints(tmp_path, best=metric, **options)]
        train(load(told_artifact), handlers, losses, validate=validate, max_steps=limit, resume=limit is None)
    assert folders(tmp_path) == {".": newest, "best": best}
    session = load(told_artifact)
    session.restore(tmp_path / "best" / f"step-{best[-1]:08d}.safetensors")
    assert session.steps == best[-1]


def test_the_best_is_saved_at_the_moment_when_it_is_best(session, tmp_path):
    """Not when it stalls: it is on the disk before the next step."""
    seen = []
    look = On("iteration_started", lambda state: seen.append(folders(tmp_path)["best"]))
    train(session, [look, Checkpoints(tmp_path, best="loss")], [5, 4, 6, 3, 7])
    assert seen == [[], [1], [2], [2], [4]]


def test_a_validation_inside_an_epoch_can_be_the_best(tiny_artifact, tmp_path):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 4)).astype(np.float32)
    data = ArrayData({"x": x, "y": x[:, :3].copy()}, 8)
    validate = On("iteration_completed", lambda state: state.validate(), when=every(3))
    handlers = [validate, Checkpoints(tmp_path, best="validation/loss", keep=1, keep_best=9)]
    Loop(load(tiny_artifact), handlers).run(data, epochs=1, validate=data)
    assert folders(tmp_path) == {".": [8], "best": [3, 6, 8]}


def test_where_there_are_no_hard_links_the_best_is_written_twice(told_artifact, tmp_path, monkeypatch):
    def refuse(old, new):
        raise OSError(95, "Operation not supported")

    train(load(told_artifact), [Checkpoints(tmp_path / "linked", best="loss")], [5, 4, 6])
    monkeypatch.setattr("os.link", refuse)
    train(load(told_artifact), [Checkpoints(tmp_path / "written", best="loss")], [5, 4, 6])
    for name in ("step-00000002.safetensors", "best/step-00000002.safetensors", "step-00000003.safetensors"):
        assert (tmp_path / "written" / name).read_bytes() == (tmp_path / "linked" / name).read_bytes()
    best = "best/step-00000002.safetensors"
    assert (tmp_path / "linked" / best).samefile(tmp_path / "linked/step-00000002.safetensors")


def test_checkpoints_by_time(session, tmp_path):
    train(session, [Checkpoints(tmp_path / "often", every_s=1e-9, keep=9)], [1, 1, 1])
    assert folders(tmp_path / "often")["."] == [1, 2, 3]
    clock = Checkpoints(tmp_path / "never", every_s=3600.0, keep=9)
    data = ArrayData({"value": np.ones(3, np.float32)}, 1)
    Loop(load(session.artifact.path), [clock]).run(data, epochs=1)
    assert folders(tmp_path / "never")["."] == [3]


# --- logs


def test_a_number_of_the_state_is_logged(told_artifact, tmp_path):
    handlers = [
        MetricsLog(tmp_path / "m.csv"),
        StateNumber(RATE),
        StateNumber("half", name="h"),
        ReduceOnPlateau(RATE, "loss", factor=0.5, patience=1),
        Checkpoints(tmp_path / "c"),
    ]
    for limit in (2, None):
        train(load(told_artifact), handlers, [5, 5, 5], max_steps=limit, resume=limit is None)
    rows = list(csv.DictReader((tmp_path / "m.csv").read_text().splitlines()))
    # The log comes before the handler that reduces, so each row has the rate that its epoch was trained with.
    assert [(row["learning_rate"], row["h"]) for row in rows] == [("0.5", "0.5"), ("0.5", "0.5"), ("0.25", "0.5")]


def test_throughput(session):
    seen = []
    note = On("epoch_completed", lambda state: seen.append({name: read() for name, read in state.values.items()}))
    train(session, [Throughput(examples_per_step=8), note], [5, 5, 5])
    for row in seen:
        assert row["examples_per_second"] == pytest.approx(8 * row["steps_per_second"], rel=0.5)
        assert row["steps_per_second"] > 0
    assert 0 < seen[0]["seconds"] < seen[1]["seconds"] < seen[2]["seconds"]


def test_log_lines(session):
    stream = io.StringIO()
    train(session, [LogLines(every=2, stream=stream), StateNumber(RATE)], [5, 4, 3, 2])
    assert stream.getvalue() == (
        "epoch 2/4  step 2  loss 4  learning_rate 0.5\nepoch 4/4  step 4  loss 2  learning_rate 0.5\n"
    )


def test_lines_stand_above_the_bar(session):
    """Where a bar is shown, a line first clears it, so that it does not end up behind it."""
    both = io.StringIO()
    with contextlib.redirect_stderr(both):
        train(session, [Progress(bar=True, stream=both), LogLines(every=1, stream=both)], [5, 4])
    shown = [line.split("\r")[-1] for line in both.getvalue().split("\n")]
    assert [line[:24] for line in shown if "loss" in line] == [
        "epoch 1/2  step 1  loss ", "epoch 1/2  step 1  loss ", "epoch 2/2  step 2  loss ", "epoch 2/2  step 2  loss ",
    ]  # fmt: skip


def test_rows_of_validations_inside_an_epoch(tiny_artifact, tmp_path):
    data = ArrayData({"x": np.ones((32, 4), np.float32), "y": np.ones((32, 3), np.float32)}, 8)
    validate = On("iteration_completed", lambda state: state.validate(), when=every(3))
    handlers = [validate, MetricsLog(tmp_path / "m.jsonl")]
    Loop(load(tiny_artifact), handlers).run(data, epochs=2, validate=data, validate_when=every(2))
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [(r["event"], r["step"], "validation/loss" in r) for r in rows] == [
        ("validation", 3, True), ("epoch", 4, False), ("validation", 6, True), ("epoch", 8, True),
    ]  # fmt: skip


def scalars(folder):
    """What the files say, by tag: the steps and values."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:  # a record: the length, its checksum, the event, its checksum
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            data = data[16 + length :]
    return found


def test_tensorboard(session, tmp_path):
    train(session, [TensorBoardLog(tmp_path, every=2), StateNumber(RATE)], [5, 4, 3], validate=[7, 8, 9])
    assert scalars(tmp_path) == {
        "train/loss": [(2, 4.0)],
        "train/learning_rate": [(2, 0.5)],
        "validation/score": [(1, 7.0), (2, 8.0), (3, 9.0)],
        "epoch/loss": [(1, 5.0), (2, 4.0), (3, 3.0)],
        "epoch/learning_rate": [(1, 0.5), (2, 0.5), (3, 0.5)],
    }


def test_without_tensorboardx_there_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(DataError, match=r"needs tensorboardX .*: install it with pip install 'fixstep\[tensorboard\]'"):
        TensorBoardLog(tmp_path)


def test_progress_in_a_notebook_uses_its_bar(session, monkeypatch, capsys):
    import tqdm.auto

    made = []

    class Widget(tqdm.auto.tqdm):
        def __init__(self, *args, **options):
            made.append(options)
            super().__init__(*args, **options)

    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr(tqdm.auto, "tqdm", Widget)
    train(session, [Progress()], [5, 4])
    assert len(made) == 2
    assert "ncols" not in made[0]  # the widget has no columns
    assert "epoch 2/2  step 2  loss 4" in capsys.readouterr().out


# --- refused


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: EarlyStop("loss", patience=0), ValueError, "patience: expected an integer of at least 1, got 0"),
        (lambda: EarlyStop("loss", mode="less"), ValueError, "mode: expected one of min, max, got 'less'"),
        (lambda: EarlyStop("loss", min_delta=-1), ValueError, "min_delta: expected a number from 0, got -1"),
        (lambda: EarlyStop("loss", paitence=3), TypeError, "unexpected keyword argument 'paitence'"),
        (lambda: ReduceOnPlateau(RATE, "loss", factor=1.5), ValueError, "factor: expected a number between 0 and 1"),
        (lambda: ReduceOnPlateau(RATE, "loss", cooldown=-1), ValueError, "cooldown: expected an integer of at least 0"),
        (lambda: ReduceOnPlateau(RATE, "loss", minimum=NAN), ValueError, "minimum: expected a number from 0, got nan"),
        (lambda: HaltOnNonFinite(every=0), ValueError, "every: expected an integer of at least 1, got 0"),
        (lambda: LogLines(every=0), ValueError, "every: expected at least 1 step, got 0"),
        (lambda: Checkpoints("x", every_s=0), ValueError, "every_s: expected more than 0 seconds, got 0"),
        (lambda: Checkpoints("x", keep_best=0), ValueError, "keep_best: expected at least 1 checkpoint, got 0"),
    ],
)
def test_refused_options(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("handler", "error", "text"),
    [
        (EarlyStop("accuracy"), ValueError, "no metric 'accuracy' to follow; there are loss, validation/score"),
        (HaltOnNonFinite(["a", "b"]), ValueError, "no metric 'a', 'b' to follow; there are loss, validation/score"),
        (
            ReduceOnPlateau("learning_rate", "loss"),
            TemplateError,
            rf"no leaf 'learning_rate' \(did you mean {RATE}\?\)",
        ),
        (ReduceOnPlateau("w", "loss"), TemplateError, r"'w': expected one floating-point number, got float32\[2\]"),
        (StateNumber("opt/count"), TemplateError, r"'opt/count': expected one floating-point number, got int32\[\]"),
    ],
)
def test_refused_before_the_first_step(session, handler, error, text):
    with pytest.raises(error, match=text):
        train(session, [handler], [1], validate=[1])
    assert session.steps == 0


def test_a_metric_of_a_validation_that_there_is_not(session, tmp_path):
    with pytest.raises(ValueError, match=r"'validation/score' to follow; there are loss \(there is no validation data"):
        train(session, [Checkpoints(tmp_path, best="validation/score")], [1])


# --- a checkpoint of another program


def test_a_checkpoint_of_another_program_is_taken_in_part_when_asked(told_artifact, tiny_artifact, tmp_path):
    source = load(told_artifact)
    train(source, [Checkpoints(tmp_path)], [1, 1])
    path = Checkpoints(tmp_path).latest().path
    session = load(tiny_artifact)
    before = session.state()
    with pytest.raises(
        CheckpointError, match=r"belongs to another program than tiny.*\n  w: expected float32\[4,3\], g"
    ):
        session.restore(path)
    with pytest.raises(CheckpointError, match=r"the leaves are not those of tiny:\n(.*\n)*  half: unexpected, got bfl"):
        load_leaves(session, path, strict=False)  # not one leaf fits
    assert all(session.state()[name].tobytes() == array.tobytes() for name, array in before.items())


def test_the_leaves_that_fit_are_taken(told_artifact, tmp_path):
    import jax
    import jax.numpy as jnp

    from fixstep.frontend import Program, compile

    def init(key):
        return {"w": jnp.ones(2), "half": jnp.float32(3), "new": jnp.ones(3)}

    program = Program(
        name="other",
        init=init,
        step=lambda state, batch: (jax.tree.map(lambda x: x * 2, state), {"loss": batch.sum()}),
        batch=jax.ShapeDtypeStruct((1,), "float32"),
    )
    compile(program, tmp_path / "other.fixstep", targets=["cpu"])
    train(load(told_artifact), [Checkpoints(tmp_path / "c")], [1, 1])
    path = Checkpoints(tmp_path / "c").latest().path
    session = load(tmp_path / "other.fixstep")
    with pytest.raises(
        CheckpointError, match=r"half: expected float32\[\], got bfloat16\[\](.*\n)*Take over .*strict=F"
    ):
        load_leaves(session, path)
    loaded = load_leaves(session, path, strict=False)
    assert (loaded.kept, loaded.missing) == (("w",), ("half", "new"))
    assert loaded.unexpected == tuple(p for p in read_checkpoint(path).leaves if p != "w")
    assert str(loaded).splitlines()[:2] == [
        f"1 leaves kept, 2 missing, {len(loaded.unexpected)} unexpected",
        "  kept: w",
    ]
    assert session.state()["w"] == pytest.approx([-1, -1])
    assert session.state()["new"] == pytest.approx([1, 1, 1])
    same = load(told_artifact)
    assert load_leaves(same, path).missing == ()
    assert same.state()["w"] == pytest.approx([-1, -1])
