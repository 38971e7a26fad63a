"""Data for the loop: order, cursors, .npz files, users' functions, and what each refuses."""

import re
import zipfile

import ml_dtypes
import numpy as np
import pytest

from fixstep.runtime import _npz
from fixstep.runtime._data import ArrayData, as_source, load_npz, load_source
from fixstep.runtime._signature import LeafSpec
from fixstep.targets.errors import DataError


def numbered(count, **options):
    return ArrayData({"x": np.arange(count), "y": np.arange(count) * 10}, 4, **options)


def order(data, epoch, start=0):
    return [batch["x"].tolist() for batch in data.batches(epoch, start)]


def test_an_epoch_holds_every_example_once_but_the_short_rest():
    data = numbered(22)
    seen = [example for batch in order(data, 1) for example in batch]
    assert len(seen) == len(set(seen)) == 20
    assert (data.batches_per_epoch, data.left_out) == (5, 2)


def test_arrays_stay_together():
    for batch in numbered(22).batches(3):
        assert (batch["y"] == batch["x"] * 10).all()


def test_order_depends_on_seed_and_epoch_alone():
    assert order(numbered(22, seed=1), 2) == order(numbered(22, seed=1), 2)
    assert order(numbered(22, seed=1), 2) != order(numbered(22, seed=1), 3)
    assert order(numbered(22, seed=1), 2) != order(numbered(22, seed=2), 2)


def test_order_is_the_same_on_every_machine():
    # Golden: a checkpoint from another machine, or of another version of numpy, must find the same order.
    assert order(ArrayData({"x": np.arange(8)}, 8, seed=7), 1) == [GOLDEN]


GOLDEN = [1, 3, 2, 7, 4, 5, 0, 6]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("start", [0, 1, 4, 5])
def test_start_leaves_out_the_first_batches(shuffle, start):
    data = numbered(22, shuffle=shuffle)
    assert order(data, 2, start) == order(data, 2)[start:]


def test_without_shuffling_batches_are_views():
    x = np.arange(8)
    first = next(ArrayData({"x": x}, 4, shuffle=False).batches(1))
    assert np.shares_memory(first["x"], x)


def test_the_short_last_batch_can_be_kept():
    data = numbered(22, shuffle=False, drop_last=False)
    assert order(data, 1)[-1] == [20, 21]
    assert (data.batches_per_epoch, data.left_out) == (6, 0)


def test_nested_containers_are_named_by_leaf_path():
    data = ArrayData({"inputs": {"x": np.zeros(4)}, "pair": (np.zeros(4), np.ones(4))}, 4)
    assert list(next(data.batches(1))) == ["inputs/x", "pair/0", "pair/1"]


@pytest.mark.parametrize(
    ("arrays", "size", "options", "text"),
    [
        ({}, 4, {}, "the data holds no arrays"),
        ({"x": np.zeros(4), "y": np.zeros(5)}, 4, {}, r"differ in .*\n  x: 4 examples, float64\[4\]\n  y: 5"),
        ({"x": np.zeros(())}, 1, {}, r"x: expected a first axis of examples, got float64\[\]"),
        ({"x": [[1, 2]]}, 1, {}, "x/0/0: expected an array, got a Python int"),
        ({"x": np.array([None])}, 1, {}, "x: expected an array, got an array of Python objects"),
        ({"x": np.zeros(3)}, 4, {}, "3 examples do not fill one batch of 4: add data"),
        ({"x": np.zeros(3)}, 0, {}, "expected a batch size of at least 1, got 0"),
        ({"x": np.zeros(3)}, 1, {"seed": -1}, "expected a seed of at least 0, got -1"),
    ],
)  # fmt: skip
def test_refused_arrays(arrays, size, options, text):
    with pytest.raises(DataError, match=text):
        ArrayData(arrays, size, **options)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("map_from", [0, 1 << 40])
def test_npz_round_trip(tmp_path, monkeypatch, save, map_from):
    monkeypatch.setattr(_npz, "MAP_FROM_BYTES", map_from)
    arrays = {
        "x": np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32),
        "inputs/x": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 3)),
    }
    save(tmp_path / "d.npz", **arrays)
    loaded = load_npz(tmp_path / "d.npz")
    assert list(loaded) == list(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)


def test_large_arrays_are_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(_npz, "MAP_FROM_BYTES", 100)
    np.savez(tmp_path / "d.npz", small=np.zeros(3), large=np.arange(100))
    loaded = load_npz(str(tmp_path / "d.npz"))
    assert isinstance(loaded["large"], np.memmap)
    assert not isinstance(loaded["small"], np.memmap)


def test_bfloat16_comes_back_where_the_template_says_so(tmp_path):
    x = np.arange(3).astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "d.npz", x=x, y=np.zeros(3))
    loaded = _npz.as_template_dtypes(load_npz(tmp_path / "d.npz"), [LeafSpec("x", "bfloat16", (3,))])
    assert loaded["x"].dtype == x.dtype
    np.testing.assert_array_equal(loaded["x"], x)


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _npz_file(path):
    np.savez(path, x=np.arange(100))


def _cut(path):
    _npz_file(path)
    path.write_bytes(path.read_bytes()[:-30])


def _flipped(path):
    _npz_file(path)
    _flip(path, 400)


def _lying(path):
    """A header that claims far more than the file has."""
    with zipfile.ZipFile(path, "w") as archive, archive.open("x.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (1 << 50,)})


def _member(name, data):
    def write(path):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, data)

    return write


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda path: None, r"d\.npz: no such file"),
        (lambda path: path.mkdir(), r"d\.npz: a folder, expected a \.npz file"),
        (lambda path: path.write_bytes(b"x,y\n1,2\n"), r"d\.npz: damaged, or not a \.npz file"),
        (_cut, r"d\.npz: damaged, or not a \.npz file"),
        (_flipped, r"d\.npz: damaged, or not a \.npz file \(Bad CRC-32 for file 'x\.npy'\)"),
        (_lying, r"d\.npz: 'x' is damaged: expected \d+ bytes by its header, got 128"),
        (lambda path: np.savez(path), r"d\.npz: holds no arrays; write it with numpy\.savez"),
        (lambda path: np.savez(path, x=np.array([{}])), r"d\.npz: 'x' holds Python objects, which are never loaded"),
        (_member("notes.txt", b"hello"), r"d\.npz: holds 'notes\.txt', which is no array"),
        (_member("x.npy", b"hello"), r"d\.npz: damaged \("),
    ],
)  # fmt: skip
def test_refused_npz(tmp_path, write, text):
    path = tmp_path / "d.npz"
    write(path)
    with pytest.raises(DataError, match=text):
        load_npz(path)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of data sources into the current directory; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        name = f"source_{abs(hash((str(tmp_path), text)))}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.mark.parametrize(
    "definition",
    [
        "def f(epoch): return range(epoch * 10, epoch * 10 + 4)",
        "def f(number): return range(number * 10, number * 10 + 4)",
        "def f(*, epoch, scale=10): return iter(range(epoch * scale, epoch * scale + 4))",
        "def f(epoch, start): return range(epoch * 10 + start, epoch * 10 + 4)",
        "def f(epoch):\n    yield from range(epoch * 10, epoch * 10 + 4)",
    ],
)
def test_function_gets_epoch_and_start(module, definition):
    source = load_source(f"{module(definition)}:f")
    assert list(source.batches(2)) == [20, 21, 22, 23]
    assert list(source.batches(2, 3)) == [23]


def test_function_without_arguments(module):
    source = load_source(f"{module('def f(size=3): return range(size)')}:f")
    assert list(source.batches(5, 1)) == [1, 2]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("f = 3", "{}:f", "is a int, expected a function"),
        ("f = 3", "{}:g", r"the module '\w+' \(.*\.py\) has no 'g'"),
        ("f = 3", "{}", "expected a data source as module:function, got"),
        ("f = 3", "absent_module:f", "no module 'absent_module' .* here or among the installed ones"),
        ("import absent_module", "{}:f", r"failed: ModuleNotFoundError: No module named 'absent_module' \(.*py:1\)"),
        ("1 / 0", "{}:f", r"failed: ZeroDivisionError: division by zero \(.*source_\d+\.py:1\)"),
    ],
)
def test_refused_source(module, text, name, message):
    with pytest.raises(DataError, match=message):
        load_source(name.format(module(text)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(): return 3", "f returned a int, expected an iterable of batches"),
        ("def f():\n    yield 1\n    1 / 0", r"f failed in epoch 1: ZeroDivisionError: .* \(.*source_\d+\.py:3\)"),
        ("def f(): return [1]", "f gave 1 batches, but the checkpoint stands after batch 2 of its epoch"),
    ],
)
def test_failing_function(module, text, message):
    source = load_source(f"{module(text)}:f")
    with pytest.raises(DataError, match=message):
        list(source.batches(1, 2 if "[1]" in text else 0))


def test_iterables_are_sources():
    source = as_source([1, 2, 3])
    assert list(source.batches(1)) == list(source.batches(2)) == [1, 2, 3]
    assert list(source.batches(2, 2)) == [3]
    assert source.batches_per_epoch == 3
    assert as_source(x for x in [1]).seek(1) is None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"x": np.zeros(3)}, "the data is a dict of arrays, expected batches: pass ArrayData"),
        ("d.npz", "the data is the path d.npz: pass ArrayData(load_npz(path), batch_size)"),
        (3, "the data is a int, expected an iterable of batches"),
    ],
)
def test_no_source(data, text):
    with pytest.raises(DataError, match=re.escape(text)):
        as_source(data)
