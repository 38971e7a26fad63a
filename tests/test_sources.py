"""What the loop trains on: iterators, loaders of other libraries (look-alikes of what they offer), prefetching."""

import threading
import time

import numpy as np
import pytest

from fixstep.runtime import HALT_EPOCH, ArrayData, Checkpoints, DatasetData, Loop, On, every, load
from fixstep.runtime._prefetch import Prefetch
from fixstep.targets.errors import DataError, TemplateError

BATCHES = 4
RNG = np.random.default_rng(5)
X = RNG.standard_normal((8 * BATCHES, 4)).astype(np.float32)
Y = RNG.standard_normal((8 * BATCHES, 3)).astype(np.float32)


def arrays(shuffle=False):
    return ArrayData({"x": X, "y": Y}, 8, shuffle=shuffle)


def stream(count=None, closed=None):
    """Batches without end, each another one."""
    number = 0
    try:
        while count is None or number < count:
            at = 8 * (number % BATCHES)
            yield {"x": X[at : at + 8] + np.float32(number // BATCHES), "y": Y[at : at + 8]}
            number += 1
    finally:
        if closed is not None:
            closed.append(threading.current_thread().name)


def state_after(artifact, data, *handlers, **options):
    session = load(artifact)
    Loop(session, handlers).run(data, **options)
    return {path: array.tobytes() for path, array in session.state().items()}


# --- iterators


def test_an_iterator_that_is_used_up_says_so(tiny_artifact):
    with pytest.raises(DataError, match=r"no batch in epoch 2: .* can be gone through only once; .*iterations=\.\.\."):
        state_after(tiny_artifact, stream(3), epochs=2)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_endless_iterator_goes_on_in_the_next_epoch(tiny_artifact, prefetch):
    session = load(tiny_artifact)
    for batch in stream(6):
        session.step(batch)
    expected = {path: array.tobytes() for path, array in session.state().items()}
    assert state_after(tiny_artifact, stream(), epochs=3, iterations=2, prefetch=prefetch) == expected


@pytest.mark.parametrize("prefetch", [0, 3])
def test_no_batch_of_an_iterator_is_lost_when_an_epoch_is_halted(tiny_artifact, prefetch):
    session = load(tiny_artifact)
    for batch in stream(6):
        session.step(batch)
    expected = {path: array.tobytes() for path, array in session.state().items()}
    for event in ("iteration_completed", "iteration_started"):

        def halt_when_some_are_ahead(state):
            if state.steps in (2, 4) and state.batch:
                time.sleep(0.05)  # the thread makes its batches meanwhile
                return HALT_EPOCH
            return None

        halt = On(event, halt_when_some_are_ahead)
        assert state_after(tiny_artifact, stream(6), halt, epochs=3, prefetch=prefetch) == expected


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_an_iterator_is_resumed_from_its_beginning(tiny_artifact, tmp_path, stop, prefetch):
    expected = state_after(tiny_artifact, stream(), epochs=4, iterations=2)
    for limit in (stop, None):
        options = {"max_steps": limit, "resume": True, "prefetch": prefetch}
        state = state_after(tiny_artifact, stream(), Checkpoints(tmp_path), epochs=4, iterations=2, **options)
    assert state == expected
    with pytest.raises(
        DataError, match="gave 3 batches, but the checkpoint stands after batch 8 of the run: an iterator"
    ):
        state_after(tiny_artifact, stream(3), Checkpoints(tmp_path), epochs=5, iterations=2, resume=True)


# --- loaders of other libraries


class Tensor:
    """An array that numpy takes over by DLPack (PyTorch), or by __array__ (TensorFlow)."""

    def __init__(self, array, how):
        self.array = array
        if how == "array":
            self.__class__ = type("EagerTensor", (Tensor,), {"__array__": lambda self, *a, **k: self.array})

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Sampler:
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch


class TorchLoader:
    """Another order in each epoch, as a loader with a DistributedSampler has it."""

    def __init__(self):
        self.sampler = Sampler()

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for index in np.random.default_rng(self.sampler.epoch).permutation(BATCHES):
            at = slice(8 * index, 8 * index + 8)
            yield {"x": Tensor(X[at].copy(), "dlpack"), "y": Tensor(Y[at].copy(), "dlpack")}


class GrainIterator:
    def __init__(self):
        self._batches = arrays().batches(1)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._batches)

    def get_state(self):
        return {"next_index": 0}

    def set_state(self, state):
        raise AssertionError("not needed")


class GrainDataset:
    """An IterDataset: no length, and an iterator that can say where it is."""

    def __iter__(self):
        return GrainIterator()


class TensorFlowDataset:
    def __len__(self):
        raise TypeError("The dataset length is unknown.")

    def __iter__(self):
        return iter([{k: Tensor(v, "array") for k, v in batch.items()} for batch in arrays().batches(1)])


class HuggingFaceDataset:
    """Columns of lists, or of arrays after with_format("numpy"); iterating gives examples, not batches."""

    column_names = ("x", "y")

    def __init__(self, convert=np.ndarray.tolist):
        self._convert = convert

    def with_format(self, kind):
        assert kind == "numpy"
        return HuggingFaceDataset(lambda array: array)

    def __len__(self):
        return len(X)

    def __getitem__(self, indices):
        return {"x": self._convert(X[indices]), "y": self._convert(Y[indices])}

    def __iter__(self):
        raise AssertionError("examples, one by one")


@pytest.mark.parametrize("make", [GrainDataset, TensorFlowDataset])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_loaders_without_an_order_of_their_own(tiny_artifact, make, prefetch):
    expected = state_after(tiny_artifact, arrays(), epochs=2)
    assert state_after(tiny_artifact, make(), epochs=2, prefetch=prefetch) == expected


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_a_loader_that_is_told_the_epoch_is_resumed_exactly(tiny_artifact, tmp_path, stop, capfd):
    expected = state_after(tiny_artifact, TorchLoader(), epochs=3)
    for limit in (stop, None):
        options = {"max_steps": limit, "resume": True}
        state = state_after(tiny_artifact, TorchLoader(), Checkpoints(tmp_path), epochs=3, **options)
    assert state == expected
    assert capfd.readouterr().err == ""


def test_a_loader_that_says_nothing_of_its_order_is_told_of(tiny_artifact, tmp_path, capfd):
    for limit in (5, None):
        state_after(tiny_artifact, GrainDataset(), Checkpoints(tmp_path), epochs=2, max_steps=limit, resume=True)
    assert "fixstep: the data says nothing of its order (no set_epoch), so the run is" in capfd.readouterr().err


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_data_set_of_examples(tiny_artifact, tmp_path, shuffle):
    dataset = HuggingFaceDataset().with_format("numpy")
    expected = state_after(tiny_artifact, arrays(shuffle), epochs=2)
    for limit in (3, None):
        data = DatasetData(dataset, 8, shuffle=shuffle)
        state = state_after(tiny_artifact, data, Checkpoints(tmp_path), epochs=2, max_steps=limit, resume=True)
    assert state == expected
    assert (data.batches_per_epoch, data.left_out, data.identity["examples"]) == (BATCHES, 0, len(X))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            HuggingFaceDataset,
            DataError,
            r'expected batches: pass DatasetData\(dataset\.with_format\("numpy"\), batch_si',
        ),
        (lambda: DatasetData(HuggingFaceDataset(), 8), TemplateError, r"x: expected float32\[8,4\], got a Python list"),
        (lambda: DatasetData(GrainDataset(), 8), DataError, "the data set is a GrainDataset without a length"),
        (lambda: DatasetData(HuggingFaceDataset(), 99), DataError, "32 examples do not fill one batch of 99"),
        (lambda: DatasetData([1] * 9, 8), DataError, r"the data set takes no list of indices \(list indices must be"),
        (lambda: DatasetData(X, 8), DataError, r"dataset\[indices\] is a ndarray, expected a mapping from column"),
    ],
)
def test_refused(tiny_artifact, make, error, text):
    with pytest.raises(error, match=text):
        state_after(tiny_artifact, make(), epochs=1)


# --- prefetching


@pytest.mark.parametrize("shuffle", [True, False])
def test_prefetching_gives_the_same_bits(tiny_artifact, tmp_path, shuffle):
    expected = state_after(tiny_artifact, arrays(shuffle), epochs=3)
    assert state_after(tiny_artifact, arrays(shuffle), epochs=3, prefetch=2) == expected
    for limit in (3, 5, None):
        options = {"max_steps": limit, "resume": True, "prefetch": 2}
        state = state_after(tiny_artifact, arrays(shuffle), Checkpoints(tmp_path), epochs=3, **options)
    assert state == expected


def test_batches_are_made_ahead_while_a_step_runs(tiny_artifact):
    made = []

    def batches():
        for batch in arrays().batches(1):
            made.append(threading.current_thread().name)
            yield batch

    class Source:
        def batches(self, epoch, start=0):
            return batches()

    seen = []

    def step_that_takes_a_while(state):
        end = time.monotonic() + 10
        while len(made) < min(state.batch + 2, BATCHES) and time.monotonic() < end:
            time.sleep(0.001)
        seen.append(len(made))

    state_after(tiny_artifact, Source(), On("iteration_completed", step_that_takes_a_while), epochs=1, prefetch=2)
    assert seen == [3, 4, 4, 4]  # the one in use and two ahead
    assert set(made) == {"fixstep-prefetch"}


def test_an_iterator_may_fill_the_same_memory_again(tiny_artifact):
    class Reused:
        def batches(self, epoch, start=0):
            x, y = np.empty((8, 4), np.float32), np.empty((8, 3), np.float32)
            for batch in arrays().batches(epoch, start):
                x[:], y[:] = batch["x"], batch["y"]
                yield {"x": x, "y": y}

    expected = state_after(tiny_artifact, arrays(), epochs=2)
    assert state_after(tiny_artifact, Reused(), epochs=2, prefetch=3) == expected


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (lambda: 1 / 0, ZeroDivisionError, "division by zero"),
        (lambda: {"x": X[:8]}, TemplateError, r"y: expected float32\[8,3\], missing"),
        (lambda: {"x": [1.0], "y": Y[:8]}, TemplateError, r"x: expected float32\[8,4\], got"),
    ],
)
def test_a_failure_comes_in_its_turn(tiny_artifact, bad, error, text):
    class Failing:
        def batches(self, epoch, start=0):
            yield from list(arrays().batches(1))[:2]
            yield bad()

    steps = []
    handler = On("iteration_completed", lambda state: steps.append(state.steps))
    with pytest.raises(error, match=text):
        state_after(tiny_artifact, Failing(), handler, prefetch=4)
    assert steps == [1, 2]


def test_a_source_whose_batch_does_not_fit_is_closed_where_it_ran(tiny_artifact):
    closed = []

    def batches():
        try:
            yield {"x": X[:8]}
        finally:
            closed.append(threading.current_thread().name)

    class Wrong:
        def batches(self, epoch, start=0):
            return batches()

    with pytest.raises(TemplateError, match=r"y: expected float32\[8,3\], missing"):
        state_after(tiny_artifact, Wrong(), prefetch=2)
    assert closed == ["fixstep-prefetch"]


def test_a_source_that_is_left_early_is_closed_where_it_ran(tiny_artifact):
    closed = []

    class Endless:
        def batches(self, epoch, start=0):
            return stream(None, closed)

    state_after(tiny_artifact, Endless(), epochs=2, iterations=2, prefetch=2)
    assert closed == ["fixstep-prefetch"] * 2
    assert not [thread for thread in threading.enumerate() if thread.name == "fixstep-prefetch"]


def test_closing_gives_back_what_was_not_used():
    returned = []
    ahead = Prefetch(iter([{"x": np.float32(i)} for i in range(5)]), 2, dict, returned.extend)
    assert float(next(ahead)["x"]) == 0
    end = time.monotonic() + 10
    while ahead._ready.qsize() < 2 and time.monotonic() < end:
        time.sleep(0.001)
    ahead.close()
    ahead.close()
    assert [float(batch["x"]) for batch in returned] == [1, 2]


def test_a_second_signal_does_not_wait_for_a_batch(tiny_artifact):
    """The thread is stuck in making a batch; whoever leaves by KeyboardInterrupt leaves at once."""
    stuck = threading.Event()

    class Stuck:
        def batches(self, epoch, start=0):
            yield from list(arrays().batches(1))[:2]
            stuck.wait(60)

    def leave(state):
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        state_after(tiny_artifact, Stuck(), On("iteration_completed", leave), prefetch=2)
    stuck.set()
    assert time.monotonic() - began < 30


def test_an_end_is_an_end_every_time():
    ahead = Prefetch(iter([]), 1, dict, lambda unused: None)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ahead)
    ahead.close()


def test_every_filter_counts_prefetched_batches_once(tiny_artifact):
    steps = []
    handler = On("iteration_started", lambda state: steps.append(state.steps), when=every(2))
    state_after(tiny_artifact, arrays(), handler, epochs=2, prefetch=2)
    assert steps == [1, 3, 5, 7]


def test_an_iterator_of_validation_data_is_used_up(tiny_artifact):
    validate = On("iteration_completed", lambda state: state.validate(), when=every(2))
    with pytest.raises(
        DataError, match=r"the validation data gave no batch in epoch 1: .* can be gone through only once"
    ):
        state_after(tiny_artifact, arrays(), validate, validate=stream(2))
