"""Events, filters, and what a handler may answer; each also where the run is resumed in between."""

import signal

import numpy as np
import pytest

from fixstep.runtime import (
    CONTINUE,
    HALT_EPOCH,
    HALT_LOOP,
    ArrayData,
    Checkpoints,
    Filter,
    Loop,
    On,
    Throughput,
    after,
    always,
    before,
    every,
    first,
    load,
    once,
)
from fixstep.runtime._events import EVENTS

BATCHES = 4  # an epoch


def data(batches=BATCHES, **options):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((8 * batches, 4)).astype(np.float32)
    return ArrayData({"x": x, "y": (x @ rng.standard_normal((4, 3))).astype(np.float32)}, 8, **options)


@pytest.fixture
def session(tiny_artifact):
    return load(tiny_artifact)


def recorder():
    """Functions on all events, and the list that they fill: event, epoch, batch, steps."""
    seen = []

    def note(event):
        return On(event, lambda state: seen.append((event, state.epoch, state.batch, state.steps)))

    return [note(event) for event in EVENTS], seen


def test_every_event_fires_in_order(session):
    handlers, seen = recorder()
    halt = On("iteration_completed", lambda state: HALT_EPOCH, when=once(2))
    Loop(session, [halt, *handlers]).run(data(3), epochs=3, max_steps=4, validate=data(1))
    assert seen == [
        ("started", 1, 0, 0),
        ("epoch_started", 1, 0, 0),
        ("iteration_started", 1, 0, 0),
        ("iteration_completed", 1, 1, 1),
        ("iteration_started", 1, 1, 1),
        ("iteration_completed", 1, 2, 2),
        ("epoch_halted", 1, 2, 2),
        ("epoch_started", 2, 0, 2),
        ("iteration_started", 2, 0, 2),
        ("iteration_completed", 2, 1, 3),
        ("iteration_started", 2, 1, 3),
        ("iteration_completed", 2, 2, 4),
        ("halted", 2, 2, 4),
        ("stopped", 2, 2, 4),
    ]
    seen.clear()
    Loop(session, handlers).run(data(1), epochs=1, validate=data(1))
    assert [event for event, *_ in seen] == [
        *("started", "epoch_started", "iteration_started", "iteration_completed"),
        *("validated", "epoch_completed", "completed", "stopped"),
    ]


@pytest.mark.parametrize("event", EVENTS)
def test_each_event_reaches_a_method_and_a_function(session, event):
    """Two of the ten need a run of their own kind: one that halts its epochs, and one that is halted."""
    called = []
    handler = type("Mine", (), {f"on_{event}": lambda self, state: called.append("method")})()
    halting = {"epoch_halted": ("iteration_completed", HALT_EPOCH), "halted": ("epoch_completed", HALT_LOOP)}
    handlers = [handler, On(event, lambda state: called.append("function"))]
    if event in halting:
        at, answer = halting[event]
        handlers.append(On(at, lambda state: answer))
    Loop(session, handlers).run(data(1), epochs=1, validate=data(1))
    assert called == ["method", "function"]


FILTERS = [
    (always, range(1, 13)),
    (first, [1]),
    (every(3), [3, 6, 9, 12]),
    (every(5), [5, 10]),
    (after(9), [10, 11, 12]),
    (before(4), [1, 2, 3]),
    (once(7), [7]),
    (once(13), []),
    (every(3, per_epoch=True), [3, 7, 11]),
    (after(3, per_epoch=True), [4, 8, 12]),
    (before(2, per_epoch=True), [1, 5, 9]),
    (once(1, per_epoch=True), [1, 5, 9]),
    (lambda state: state.steps % 4 == 1, [1, 5, 9]),
]


@pytest.mark.parametrize(("when", "expected"), FILTERS)
@pytest.mark.parametrize("stop", [None, 3, 4])
def test_filters_count_through_a_resume(tiny_artifact, tmp_path, when, expected, stop):
    steps = []
    handler = On("iteration_completed", lambda state: steps.append(state.steps), when=when)
    for limit in (stop, None):
        loop = Loop(load(tiny_artifact), [handler, Checkpoints(tmp_path)])
        loop.run(data(), epochs=3, max_steps=limit, resume=limit is None and stop is not None)
        if stop is None:
            break
    assert steps == list(expected)


@pytest.mark.parametrize(("when", "epochs"), [(every(2), [2, 4]), (after(3), [4]), (once(3), [3]), (first, [1])])
def test_filters_on_epochs(session, when, epochs):
    seen = {"epoch_started": [], "epoch_completed": []}
    handlers = [On(event, lambda state, event=event: seen[event].append(state.epoch), when=when) for event in seen]
    Loop(session, handlers).run(data(1), epochs=4)
    assert seen == {"epoch_started": epochs, "epoch_completed": epochs}


def test_iteration_started_is_numbered_like_its_step(session):
    steps = []
    Loop(session, [On("iteration_started", lambda state: steps.append(state.steps), when=every(3))]).run(
        data(), epochs=2
    )
    assert steps == [2, 5]


def test_a_skipped_batch_is_not_completed(session):
    source = data(shuffle=False)
    x = source.arrays["x"].copy()
    x[8] = np.nan
    counted = []
    handlers = [On("iteration_completed", lambda state: counted.append(state.batch), when=every(2, per_epoch=True))]
    Loop(session, handlers, on_nonfinite="skip").run(ArrayData({**source.arrays, "x": x}, 8, shuffle=False), epochs=2)
    assert counted == [3, 3]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: On("iteration_complete", print), ValueError,
         r"no event 'iteration_complete' \(did you mean iteration_completed\?\); the events are started, epoch_"),
        (lambda: On("step", print), ValueError, "no event 'step'; the events are"),
        (lambda: On("started", 3), TypeError, "started: expected a function of the loop's state, got 3"),
        (lambda: On("started", print, when="every"), TypeError, r"expected a filter \(always, first, every\(n\)"),
        (lambda: On("started", print, when=every), TypeError, r"the filter needs its number, such as every\(10\)"),
        (lambda: On("epoch_completed", print, when=every(2, per_epoch=True)), ValueError, "does not repeat in one"),
        (lambda: every(0), ValueError, "every: expected an integer of at least 1, got 0"),
        (lambda: once(1.5), ValueError, "once: expected an integer of at least 1, got 1.5"),
        (lambda: every(2, per_eopch=True), TypeError, "unexpected keyword argument"),
    ],
)  # fmt: skip
def test_wrong_names_are_refused_when_attached(make, error, text):
    with pytest.raises(error, match=text):
        make()


class OnlyState:
    def on_started(self, state):
        pass

    def state(self):
        return {}


def test_more_that_is_refused(session):
    with pytest.raises(TypeError, match="handler OnlyState has state but no load_state"):
        Loop(session, [OnlyState()])
    with pytest.raises(TypeError, match=r"handler builtin.* has none of the methods .*; attach a function with On"):
        Loop(session, [print])
    with pytest.raises(TypeError, match=r"mine answered HALT_EPOCH to epoch_completed; only epoch_started, iteration_"):

        def mine(state):
            return HALT_EPOCH

        Loop(session, [On("epoch_completed", mine)]).run(data(1), epochs=1)
    with pytest.raises(TypeError, match=r"validate_when: expected a filter of epochs, such as every\(5\), got 3"):
        Loop(session).run(data(1), validate=data(1), validate_when=3)
    with pytest.raises(ValueError, match="the handlers Throughput and Throughput both log 'steps_per_second': name"):
        Loop(session, [Throughput(), Throughput()])
    assert isinstance(every(3), Filter)
    assert CONTINUE is not None


@pytest.mark.parametrize(
    ("event", "when", "steps", "batches"),
    [
        ("epoch_started", once(2), 4, [4, 0]),
        ("iteration_started", once(7), 6, [4, 2]),
        ("iteration_completed", once(7), 7, [4, 3]),
    ],
)
def test_halt_epoch_goes_on_with_the_next(session, event, when, steps, batches):
    ends = []
    handlers = [
        On(event, lambda state: HALT_EPOCH, when=when),
        On("epoch_completed", lambda state: ends.append(state.batch)),
        On("epoch_halted", lambda state: ends.append(state.batch)),
    ]
    result = Loop(session, handlers).run(data(), epochs=2)
    assert (result.steps, result.epochs, result.stopped) == (steps, 2, "finished")
    assert ends == batches


@pytest.mark.parametrize("event", ["started", "epoch_started", "iteration_started", "iteration_completed", "validated"])
def test_halt_loop_ends_the_run_and_says_who(session, event):
    def enough(state):
        return HALT_LOOP

    handlers, seen = recorder()
    result = Loop(session, [On(event, enough), *handlers]).run(data(), epochs=3, validate=data(1))
    assert result.stopped == "enough"
    assert result.steps == {"iteration_completed": 1, "validated": 4}.get(event, 0)
    assert [name for name, *_ in seen][-2:] == ["halted", "stopped"]
    assert "completed" not in [name for name, *_ in seen]


def test_a_halted_epoch_stays_halted_through_a_kill(tiny_artifact, tmp_path):
    """A checkpoint right after the answer, before the epoch has ended: the resumed run must not train on in it."""

    def run(*extra, resume=False):
        session = load(tiny_artifact)
        handlers, seen = recorder()
        halt = On("iteration_completed", lambda state: HALT_EPOCH, when=once(2))
        Loop(session, [halt, *extra, *handlers]).run(data(), epochs=2, resume=resume)
        return session, seen

    def die(state):
        raise KeyboardInterrupt  # which saves nothing more, as a kill does

    whole, _ = run()
    checkpoints = Checkpoints(tmp_path, every=1)
    with pytest.raises(KeyboardInterrupt):
        run(On("epoch_halted", die), checkpoints)
    resumed, seen = run(checkpoints, resume=True)
    assert seen[:2] == [("started", 1, 2, 2), ("epoch_halted", 1, 2, 2)]
    assert all(resumed.state()[path].tobytes() == array.tobytes() for path, array in whole.state().items())


def test_filters_on_validations_count_through_a_resume(tiny_artifact, tmp_path):
    steps = []
    handlers = [
        On("iteration_completed", lambda state: state.validate(), when=every(3)),
        On("validated", lambda state: steps.append(state.steps), when=every(2)),
        Checkpoints(tmp_path),
    ]
    for limit in (3, 4, 8, None):
        Loop(load(tiny_artifact), handlers).run(data(), epochs=3, validate=data(1), max_steps=limit, resume=True)
    assert steps == [4, 8, 12]  # of 3, 4, 6, 8, 9, 12 and 12 again


def test_validation_at_any_event(session):
    handlers, seen = recorder()
    validate = On("iteration_completed", lambda state: state.validate(), when=every(3))
    Loop(session, [validate, *handlers]).run(data(), epochs=4, validate=data(1), validate_when=every(4))
    steps = [(epoch, steps) for event, epoch, _, steps in seen if event == "validated"]
    assert steps == [(1, 3), (2, 6), (3, 9), (3, 12), (4, 15), (4, 16)]


def test_a_validation_of_a_handlers_is_not_broken_off(session, capfd):
    """A signal ends the run after the event; a validation that nobody would repeat is done first."""

    def interrupted(state):
        signal.raise_signal(signal.SIGTERM)
        state.validate()

    handlers, seen = recorder()
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        for event in ("iteration_completed", "epoch_completed"):
            Loop(session, [On(event, interrupted, when=once(1)), *handlers]).run(
                data(2), epochs=2, validate=data(3), validate_when=every(9)
            )
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert [steps for event, _, _, steps in seen if event == "validated"] == [1, 3]


def test_validation_at_any_event_needs_data(session):
    with pytest.raises(RuntimeError, match=r"no validation data: give some to the loop, run\(data, validate=\.\.\.\)"):
        Loop(session, [On("started", lambda state: state.validate())]).run(data())


class Counter:
    """Keeps a count that a resume must hand back."""

    def __init__(self):
        self.count, self.epochs = 0, 0

    def state(self):
        return {"count": self.count, "epochs": self.epochs}

    def load_state(self, state):
        self.count, self.epochs = state["count"], state["epochs"]

    def on_iteration_completed(self, state):
        self.count += 1

    def on_epoch_started(self, state):
        self.epochs += 1

    def on_epoch_completed(self, state):
        self.epochs += 100


@pytest.mark.parametrize("stops", [[1], [4], [5], [3, 4, 8, 11]])
def test_handlers_get_their_state_back(tiny_artifact, tmp_path, stops):
    for stop in [*stops, None]:
        one, two = Counter(), Counter()
        loop = Loop(load(tiny_artifact), [one, two, Checkpoints(tmp_path)])
        loop.run(data(), epochs=3, max_steps=stop, resume=True)
    assert one.state() == two.state() == {"count": 12, "epochs": 303}


def test_an_epoch_that_began_and_was_stopped_at_once_does_not_begin_again(tiny_artifact, tmp_path):
    counter = Counter()
    handlers = [counter, On("epoch_started", lambda state: HALT_LOOP, when=once(2)), Checkpoints(tmp_path)]
    assert Loop(load(tiny_artifact), handlers).run(data(), epochs=2).steps == BATCHES
    assert counter.epochs == 102
    counter = Counter()
    Loop(load(tiny_artifact), [counter, Checkpoints(tmp_path)]).run(data(), epochs=2, resume=True)
    assert counter.state() == {"count": 8, "epochs": 202}


def test_an_epochs_end_that_failed_happens_once_more_and_counts_once(tiny_artifact, tmp_path):
    def fail(state):
        raise ZeroDivisionError("of the handler")

    counter = Counter()
    with pytest.raises(ZeroDivisionError, match="of the handler"):
        Loop(load(tiny_artifact), [counter, On("epoch_completed", fail), Checkpoints(tmp_path)]).run(data(), epochs=2)
    assert counter.epochs == 101
    counter = Counter()
    Loop(load(tiny_artifact), [counter, Checkpoints(tmp_path)]).run(data(), epochs=2, resume=True)
    assert counter.state() == {"count": 8, "epochs": 202}


def test_handlers_that_came_or_went_are_told(tiny_artifact, tmp_path, capfd):
    Loop(load(tiny_artifact), [Counter(), Checkpoints(tmp_path)]).run(data(), max_steps=1)
    Loop(load(tiny_artifact), [Checkpoints(tmp_path)]).run(data(), max_steps=2, resume=True)
    assert "fixstep: the checkpoint's state of Counter is dropped: no such handler" in capfd.readouterr().err
    Loop(load(tiny_artifact), [Counter(), Checkpoints(tmp_path)]).run(data(), max_steps=3, resume=True)
    assert "fixstep: the checkpoint has no state of Counter, which begins anew" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "steps", "epochs", "events"),
    [
        ({"epochs": 0}, 0, 0, ["started", "completed", "stopped"]),
        ({"max_steps": 0}, 0, 0, ["started", "halted", "stopped"]),
        ({"epochs": 2, "iterations": 0}, 0, 2,
         ["started", *2 * ["epoch_started", "epoch_completed"], "completed", "stopped"]),
    ],
)  # fmt: skip
def test_nothing_to_do_is_done(session, options, steps, epochs, events):
    handlers, seen = recorder()
    result = Loop(session, handlers).run(data(), **options)
    assert (result.steps, result.epochs, result.averages) == (steps, epochs, {})
    assert [event for event, *_ in seen] == events


def test_iterations_limit_each_epoch(tiny_artifact, tmp_path):
    whole = load(tiny_artifact)
    assert Loop(whole).run(data(), epochs=3, iterations=3).steps == 9
    for limit in (1, 3, 5, None):
        parts = load(tiny_artifact)
        Loop(parts, [Checkpoints(tmp_path)]).run(data(), epochs=3, iterations=3, max_steps=limit, resume=True)
    assert parts.steps == 9
    assert all(parts.state()[path].tobytes() == array.tobytes() for path, array in whole.state().items())
    with pytest.raises(ValueError, match=r"the data is not that of the checkpoint.*\n  iterations: expected 3, got 2"):
        Loop(load(tiny_artifact), [Checkpoints(tmp_path)]).run(data(), epochs=3, iterations=2, resume=True)


def test_epochs_is_the_total(tiny_artifact, tmp_path):
    Loop(load(tiny_artifact), [Checkpoints(tmp_path)]).run(data(), epochs=2)
    result = Loop(load(tiny_artifact), [Checkpoints(tmp_path)]).run(data(), epochs=3, resume=True)
    assert (result.steps, result.epochs) == (12, 3)
    again = Loop(load(tiny_artifact), [Checkpoints(tmp_path)]).run(data(), epochs=3, resume=True)
    assert (again.steps, again.epochs, again.averages) == (12, 3, result.averages)
