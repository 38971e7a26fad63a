"""The loop: events, averages, non-finite metrics, signals, checkpoints, and resuming bit for bit."""

import csv
import json
import signal
import threading

import numpy as np
import pytest

from fixstep.runtime._checkpoints import Checkpoints
from fixstep.runtime._data import ArrayData
from fixstep.runtime._events import CONTINUE, HALT_LOOP
from fixstep.runtime._load import load
from fixstep.runtime._loop import Loop
from fixstep.runtime._metrics_log import MetricsLog
from fixstep.runtime._progress import Progress
from fixstep.targets.errors import CheckpointError, DataError, NonFiniteError, ProgramError, TemplateError

BATCHES = 6  # an epoch


def data(examples=51, seed=3, **options):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((examples, 4)).astype(np.float32)
    return ArrayData({"x": x, "y": (x @ rng.standard_normal((4, 3))).astype(np.float32)}, 8, seed=seed, **options)


def poisoned(*batches):
    """Data in order, with a NaN in each of these batches (from 0)."""
    source = data(shuffle=False)
    x = source.arrays["x"].copy()
    for batch in batches:
        x[batch * 8, 0] = np.nan
    return ArrayData({"x": x, "y": source.arrays["y"]}, 8, shuffle=False)


@pytest.fixture
def session(tiny_artifact):
    return load(tiny_artifact)


def same_state(one, two):
    return all(one.state()[path].tobytes() == two.state()[path].tobytes() for path in one.state())


class Recorder:
    """Every event with the epoch, batch and step at that moment."""

    def __init__(self):
        self.events = []

    def _note(self, event, state):
        self.events.append((event, state.epoch, state.batch, state.steps))

    def on_started(self, state):
        self._note("start", state)

    def on_iteration_completed(self, state):
        self._note("step", state)

    def on_validated(self, state):
        self._note("validate", state)
        assert state.validation

    def on_epoch_completed(self, state):
        self._note("epoch", state)
        assert state.averages

    def on_stopped(self, state):
        self._note("stop", state)


class At:
    """Does something after a given step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_iteration_completed(self, state):
        return self.act(state) if state.steps == self.step else None


def fail(state):
    raise ZeroDivisionError("of the handler")


def interrupt(state):
    signal.raise_signal(signal.SIGINT)


# --- events and results


def test_events_in_order(session):
    recorder = Recorder()
    Loop(session, [recorder]).run(data(examples=16), epochs=2, validate=data(examples=8))
    assert recorder.events == [
        ("start", 1, 0, 0),
        ("step", 1, 1, 1),
        ("step", 1, 2, 2),
        ("validate", 1, 2, 2),
        ("epoch", 1, 2, 2),
        ("step", 2, 1, 3),
        ("step", 2, 2, 4),
        ("validate", 2, 2, 4),
        ("epoch", 2, 2, 4),
        ("stop", 3, 0, 4),
    ]


def test_averages_are_those_of_each_epoch(session, tiny_artifact):
    losses = []
    result = Loop(session).run(data(), epochs=2, validate=data(examples=24, shuffle=False))
    again = load(tiny_artifact)
    for epoch in (1, 2):
        losses = [float(again.step(batch)["loss"]) for batch in data().batches(epoch)]
    validation = [float(again.evaluate(batch)["loss"]) for batch in data(examples=24, shuffle=False).batches(1)]
    assert result.averages["loss"] == pytest.approx(np.mean(losses), rel=1e-6)  # the sum is float32
    assert result.validation["loss"] == pytest.approx(np.mean(validation), rel=1e-6)
    assert (result.steps, result.epochs, result.stopped) == (2 * BATCHES, 2, "finished")
    assert same_state(session, again)


def test_max_steps_inside_an_epoch(session):
    result = Loop(session).run(data(), epochs=3, max_steps=BATCHES + 2)
    assert (result.steps, result.epochs, result.stopped) == (BATCHES + 2, 1, "max_steps")
    assert result.averages


def test_max_steps_at_the_end_of_an_epoch_ends_it(session):
    result = Loop(session).run(data(), epochs=3, max_steps=BATCHES, validate=data())
    assert (result.epochs, result.stopped) == (1, "max_steps")
    assert result.validation


@pytest.mark.parametrize(
    ("answer", "steps", "stopped"), [(HALT_LOOP, 4, "At"), (CONTINUE, 12, "finished"), (None, 12, "finished")]
)
def test_a_handler_can_stop_the_run(session, answer, steps, stopped):
    result = Loop(session, [At(4, lambda state: answer)]).run(data(), epochs=2)
    assert (result.steps, result.stopped) == (steps, stopped)


def test_any_iterable_of_batches(session, tiny_artifact):
    Loop(session).run(list(data(shuffle=False).batches(1)), epochs=2)
    other = load(tiny_artifact)
    Loop(other).run(data(shuffle=False), epochs=2)
    assert same_state(session, other)


class Misnamed:
    def on_epochs(self, state):
        pass


class Chatty:
    def on_iteration_completed(self, state):
        return "stop"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda s: Loop(s, on_nonfinite="ignore"), ValueError, "expected one of stop, skip, continue, got 'ignore'"),
        (lambda s: Loop(s, watch="accuracy"), ValueError, "no metric 'accuracy' to watch; it has loss: pass watch"),
        (lambda s: Loop(s, [Misnamed()]), TypeError, "Misnamed has on_epochs, but the events are on_started, on_"),
        (lambda s: Loop(s, [object()]), TypeError, "handler object has none of the methods on_started"),
        (lambda s: Loop(s, [Progress]), TypeError, r"got the class Progress: make one, Progress\(\.\.\.\)"),
        (lambda s: Loop(s, [Chatty()]).run(data()), TypeError, "Chatty answered 'stop' to iteration_completed, exp"),
        (lambda s: Loop(s).run(data(), epochs=-1), ValueError, "epochs: expected an integer from 0, got -1"),
        (lambda s: Loop(s).run(data(), iterations=1.5), ValueError, "iterations: expected an integer from 0, got 1.5"),
        (lambda s: Loop(s).run(data(), resume=True), CheckpointError, "resume=True needs a Checkpoints handler"),
        (lambda s: Loop(s).run([], epochs=1), DataError, "the data gave no batch: an epoch needs at least one"),
        (lambda s: Loop(s).run(data(), validate=[]), DataError, "the validation data gave no batch"),
        (lambda s: Loop(s).run(data().batches(1)), DataError, "no batch in epoch 2: .* can be gone through only once"),
        (lambda s: Loop(s).run({"x": 1}), DataError, "the data is a dict of arrays, expected batches"),
        (lambda s: Checkpoints("x", every=0), ValueError, "every: expected at least 1 step, got 0"),
        (lambda s: Checkpoints("x", keep=0), ValueError, "keep: expected at least 1 checkpoint, got 0"),
        (lambda s: MetricsLog("x.txt"), DataError, r"x\.txt: expected a metrics file that ends in \.csv or \.jsonl"),
        (lambda s: MetricsLog("absent/x.csv"), None, None),
    ],
)  # fmt: skip
def test_refused(session, make, error, text):
    if error is None:
        make(session)
        return
    with pytest.raises(error, match=text):
        make(session)


def test_validation_needs_evaluate(tmp_path, tiny_program):
    import dataclasses

    from fixstep.frontend import compile

    compile(dataclasses.replace(tiny_program, evaluate=None), tmp_path / "plain.fixstep", targets=["cpu"])
    with pytest.raises(ProgramError, match="the artifact has no evaluate function: leave it out, or compile"):
        Loop(load(tmp_path / "plain.fixstep")).run(data(), validate=data())


# --- what is not finite


def test_stop_undoes_the_step_and_saves(session, tiny_artifact, tmp_path):
    with pytest.raises(NonFiniteError, match=r"loss became nan at epoch 1, batch 4 \(step 4\); the step was undone"):
        Loop(session, [Checkpoints(tmp_path)]).run(poisoned(3))
    other = load(tiny_artifact)
    Loop(other).run(poisoned(), max_steps=3)
    assert same_state(session, other)
    assert other.restore(Checkpoints(tmp_path).latest().path)["batch"] == 3
    assert same_state(session, other)


def test_skip_leaves_the_batch_out(session, tiny_artifact):
    result = Loop(session, on_nonfinite="skip").run(poisoned(1, 4), epochs=1)
    assert (result.steps, result.skipped, result.epochs) == (BATCHES - 2, 2, 1)
    other = load(tiny_artifact)
    good = [batch for index, batch in enumerate(poisoned().batches(1)) if index not in (1, 4)]
    same = Loop(other).run(good, epochs=1)
    assert same_state(session, other)
    assert result.averages == same.averages


def test_skip_gives_up(session):
    with pytest.raises(NonFiniteError, match=r"loss became nan at epoch 17, batch 4 .* as were the 99 before it"):
        Loop(session, on_nonfinite="skip").run(poisoned(*range(BATCHES)), epochs=100)
    assert session.steps == 0


def test_skips_count_in_a_row_only(session):
    assert Loop(session, on_nonfinite="skip").run(poisoned(1, 4), epochs=60).skipped == 120


def test_continue_goes_on(session):
    result = Loop(session, on_nonfinite="continue").run(poisoned(1), epochs=1)
    assert np.isnan(result.averages["loss"])
    assert result.steps == BATCHES


def test_a_skipped_batch_stays_skipped_after_resuming(tiny_artifact, tmp_path):
    whole = load(tiny_artifact)
    Loop(whole, on_nonfinite="skip").run(poisoned(1, 4), epochs=2)
    for steps in (2, 7, None):
        parts = load(tiny_artifact)
        loop = Loop(parts, [Checkpoints(tmp_path)], on_nonfinite="skip")
        result = loop.run(poisoned(1, 4), epochs=2, max_steps=steps, resume=True)
    assert same_state(whole, parts)
    assert result.skipped == 4


# --- checkpoints, failures, signals


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def saved_steps(folder):
    return [int(name[5:13]) for name in names(folder)]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [6, 12, 13]),
        ({"every": 4}, [8, 12, 13]),
        ({"every": 5, "keep": 10}, [5, 6, 10, 12, 13]),
        ({"keep": 1}, [13]),
    ],
)
def test_when_checkpoints_are_written(session, tmp_path, options, steps):
    result = Loop(session, [Checkpoints(tmp_path / "runs" / "a", **options)]).run(data(), max_steps=13)
    assert saved_steps(tmp_path / "runs" / "a") == steps
    assert result.checkpoint == tmp_path / "runs" / "a" / "step-00000013.safetensors"


def test_another_runs_folder_is_refused(session, tmp_path):
    Loop(session, [Checkpoints(tmp_path)]).run(data(), epochs=1)
    before = names(tmp_path)
    log = tmp_path / "m.csv"
    with pytest.raises(CheckpointError, match=r"already holds checkpoints, the newest step-00000006.*resume=True"):
        Loop(session, [MetricsLog(log), Checkpoints(tmp_path)]).run(data(), epochs=2)
    assert names(tmp_path) == before
    assert session.steps == BATCHES


def test_a_folder_that_is_a_file_is_refused_before_training(session, tmp_path):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(CheckpointError, match=r"f: cannot be made a folder of checkpoints: File exists"):
        Loop(session, [Checkpoints(tmp_path / "f")]).run(data())
    assert session.steps == 0


def test_resuming_without_a_checkpoint_starts_anew(session, tmp_path):
    assert Loop(session, [Checkpoints(tmp_path / "new")]).run(data(), epochs=1, resume=True).steps == BATCHES


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"seed": 4}, "seed: expected 3, got 4"),
        ({"shuffle": False}, "shuffle: expected True, got False"),
        ({"examples": 52}, "examples: expected 51, got 52"),
    ],
)
def test_resuming_with_other_data_is_refused(session, tiny_artifact, tmp_path, changed, text):
    Loop(session, [Checkpoints(tmp_path)]).run(data(), max_steps=2)
    with pytest.raises(DataError, match=rf"the data is not that of the checkpoint.*\n  {text}\nResume .*step-00000002"):
        Loop(load(tiny_artifact), [Checkpoints(tmp_path)]).run(data(**changed), resume=True)
    assert saved_steps(tmp_path) == [2]


def test_a_checkpoint_without_a_loops_position_is_refused(session, tmp_path):
    session.save(tmp_path / "step-00000000.safetensors")
    with pytest.raises(CheckpointError, match="holds no position of a loop"):
        Loop(session, [Checkpoints(tmp_path)]).run(data(), resume=True)


def bad_batches():
    for index, batch in enumerate(data().batches(1)):
        yield batch if index < 2 else {"x": batch["x"]}


def failing_batches():
    yield from list(data().batches(1))[:2]
    raise ZeroDivisionError("of the data")


@pytest.mark.parametrize(
    ("handlers", "batches", "error", "text", "steps"),
    [
        ([], bad_batches, TemplateError, r"y: expected float32\[8,3\], missing", 2),
        ([], failing_batches, ZeroDivisionError, "of the data", 2),
        ([At(2, fail)], lambda: data(), ZeroDivisionError, "of the handler", 2),
    ],
)
def test_a_failure_is_raised_as_it_is_after_saving(tiny_artifact, tmp_path, handlers, batches, error, text, steps):
    session = load(tiny_artifact)
    recorder = Recorder()
    with pytest.raises(error, match=text):
        Loop(session, [*handlers, recorder, Checkpoints(tmp_path)]).run(batches())
    assert session.steps == steps
    assert recorder.events[-1] == ("stop", 1, 2, 2)
    resumed = load(tiny_artifact)
    assert resumed.restore(Checkpoints(tmp_path).latest().path)["batch"] == 2
    whole = load(tiny_artifact)
    for batch in list(data().batches(1))[:2]:
        whole.step(batch)
    assert same_state(whole, resumed)


class FailsToStop:
    def on_stopped(self, state):
        raise OSError("disk full")


def test_a_failure_while_stopping_is_told(session):
    with pytest.raises(ZeroDivisionError) as caught:
        Loop(session, [At(2, fail), FailsToStop()]).run(data())
    assert caught.value.__notes__ == ["while stopping, this failed too: OSError: disk full"]
    with pytest.raises(OSError, match="disk full"):
        Loop(session, [FailsToStop()]).run(data())


def test_sigint_finishes_the_step_saves_and_interrupts(session, tmp_path, capfd):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Loop(session, [At(4, interrupt), Checkpoints(tmp_path)]).run(data())
    assert signal.getsignal(signal.SIGINT) is before
    assert saved_steps(tmp_path) == [4]
    error = capfd.readouterr().err
    assert "fixstep: SIGINT: stopping after this step; once more ends at once" in error
    assert f"fixstep: stopped by SIGINT after step 4; saved {tmp_path}/step-00000004.safetensors" in error


def test_sigterm_reaches_the_programs_own_handler(session, capfd):
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        result = Loop(session, [At(4, lambda state: signal.raise_signal(signal.SIGTERM))]).run(data())
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert received == [signal.SIGTERM]
    assert (result.steps, result.stopped) == (4, "SIGTERM")
    assert "nothing was saved, as no Checkpoints were set" in capfd.readouterr().err


def test_a_second_signal_acts_at_once(session):
    def twice(state):
        interrupt(state)
        interrupt(state)
        raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        Loop(session, [At(2, twice)]).run(data())


def test_a_signal_during_validation_leaves_the_epoch_open(session, tiny_artifact, tmp_path):
    def validation():
        interrupt(None)
        yield from data().batches(1)

    class Once:
        def batches(self, epoch, start=0):
            return validation()

    with pytest.raises(KeyboardInterrupt):
        Loop(session, [Checkpoints(tmp_path)]).run(data(), validate=Once(), epochs=1)
    resumed = load(tiny_artifact)
    recorder = Recorder()
    result = Loop(resumed, [recorder, Checkpoints(tmp_path)]).run(data(), validate=data(), epochs=1, resume=True)
    whole = Loop(load(tiny_artifact)).run(data(), validate=data(), epochs=1)
    assert [event for event, *_ in recorder.events] == ["start", "validate", "epoch", "stop"]
    assert (result.averages, result.validation) == (whole.averages, whole.validation)


def test_outside_the_main_thread_signals_are_left_alone(tiny_artifact):
    results = []
    thread = threading.Thread(target=lambda: results.append(Loop(load(tiny_artifact)).run(data(), epochs=1)))
    thread.start()
    thread.join()
    assert results[0].steps == BATCHES


# --- resuming


def run_to(artifact, folder, suffix, *, steps=None, resume=True, every=None):
    session = load(artifact)
    handlers = [Checkpoints(folder, every=every), MetricsLog(folder / f"log{suffix}", every=2)]
    result = Loop(session, handlers).run(
        data(), epochs=3, validate=data(examples=24), max_steps=steps, resume=resume
    )  # fmt: skip
    return session, result


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@pytest.mark.parametrize("stops", [[1], [4], [BATCHES - 1], [BATCHES], [BATCHES + 1], [3, 7, 8, 15], [18]])
def test_resuming_is_exact(tiny_artifact, tmp_path, stops, suffix):
    whole, expected = run_to(tiny_artifact, tmp_path / "whole", suffix, resume=False)
    for stop in stops:
        run_to(tiny_artifact, tmp_path / "parts", suffix, steps=stop)
    parts, result = run_to(tiny_artifact, tmp_path / "parts", suffix)
    assert same_state(whole, parts)
    if stops != [18]:  # then the second run found nothing left to do
        assert (result.averages, result.validation) == (expected.averages, expected.validation)
    for name in (f"log{suffix}", "step-00000018.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_resuming_behind_the_last_row_of_the_log(tiny_artifact, tmp_path):
    """A kill after rows that no checkpoint covers, in the middle of a line: the rows are written anew, once."""
    run_to(tiny_artifact, tmp_path / "whole", ".csv", resume=False)
    run_to(tiny_artifact, tmp_path / "parts", ".csv", steps=14, every=5)
    for name in ("step-00000014.safetensors", "step-00000012.safetensors"):
        (tmp_path / "parts" / name).unlink()
    with (tmp_path / "parts" / "log.csv").open("a") as file:
        file.write("step,3,15,0.4")
    run_to(tiny_artifact, tmp_path / "parts", ".csv")
    assert (tmp_path / "parts" / "log.csv").read_bytes() == (tmp_path / "whole" / "log.csv").read_bytes()


def test_a_damaged_newest_checkpoint_is_passed_over(tiny_artifact, tmp_path, capfd):
    whole, _ = run_to(tiny_artifact, tmp_path / "whole", ".csv", resume=False)
    run_to(tiny_artifact, tmp_path / "parts", ".csv", steps=14)
    newest = tmp_path / "parts" / "step-00000014.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    parts, _ = run_to(tiny_artifact, tmp_path / "parts", ".csv")
    assert same_state(whole, parts)
    assert "fixstep: passed over a damaged checkpoint: " in capfd.readouterr().err


# --- the log and the progress bar


def test_log_rows(session, tmp_path):
    Loop(session, [MetricsLog(tmp_path / "m.csv"), MetricsLog(tmp_path / "m.jsonl", every=5)]).run(
        data(), epochs=2, validate=data()
    )
    rows = list(csv.DictReader((tmp_path / "m.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["6", "12"]
    assert list(rows[0]) == ["event", "epoch", "step", "loss", "validation/loss"]
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [(line["event"], line["epoch"], line["step"]) for line in lines] == [
        ("step", 1, 5), ("epoch", 1, 6), ("step", 2, 10), ("epoch", 2, 12),
    ]  # fmt: skip
    assert float(rows[1]["validation/loss"]) == lines[-1]["validation/loss"]


def test_json_has_no_nan(session, tmp_path):
    Loop(session, [MetricsLog(tmp_path / "m.jsonl")], on_nonfinite="continue").run(poisoned(1), epochs=1)
    assert json.loads((tmp_path / "m.jsonl").read_text())["loss"] is None


@pytest.mark.parametrize(
    ("content", "resume", "text"),
    [
        ("anything", False, r"m\.csv already exists: continue that run with resume=True \(--resume\), or choose"),
        ("a,b\n1,2\n", True, r"m\.csv: expected the columns event,epoch,step,loss, got a,b: choose another file"),
        ("event,epoch,step,loss\n1\n", True, r"m\.csv, line 2: not a row of a metrics file"),
        (None, False, r"m\.csv: no folder to write to: make .*absent, or choose another"),
    ],
)
def test_a_foreign_log_is_refused(session, tmp_path, content, resume, text):
    path = tmp_path / ("absent" if content is None else "") / "m.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=text):
        Loop(session, [MetricsLog(path), Checkpoints(tmp_path / "c")]).run(data(), resume=resume)
    assert content is None or path.read_text() == content
    assert names(tmp_path / "c") == []
    assert session.steps == 0


def test_progress_is_silent_without_a_terminal(session, capfd):
    Loop(session, [Progress()]).run(data(), epochs=1)
    assert capfd.readouterr() == ("", "")


def test_progress_lines(session, capsys):
    Loop(session, [Progress(lines=True)], on_nonfinite="skip").run(poisoned(1), epochs=1, validate=data(examples=15))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training: 3 examples do not fill a batch and are left out of each epoch"
    assert lines[1] == "validation: 7 examples do not fill a batch and are left out of each epoch"
    assert lines[2].startswith("epoch 1/1  step 5  loss ")
    assert "  validation: loss " in lines[2]
    assert lines[2].endswith(" steps/s)")
    assert lines[3] == "batches skipped, because the watched metric was not finite: 1"


def test_progress_bar(session, capsys):
    Loop(session, [Progress(bar=True)]).run(data(), epochs=2)
    captured = capsys.readouterr()
    assert "epoch 2/2" in captured.err
    assert "loss " in captured.err
    assert len(captured.out.splitlines()) == 3  # what is left out, and two epochs
