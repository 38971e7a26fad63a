import hashlib
import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixstep.runtime import _checkpoint, _tensors
from fixstep.runtime._checkpoint import explain_mismatch, read_checkpoint, write_checkpoint
from fixstep.runtime._signature import LeafSpec, dtype_from_name
from fixstep.targets.errors import CheckpointError

STORED_AS = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "F32",
    "complex128": "F64", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "U8", "float8_e4m3fnuz": "U8", "float8_e5m2fnuz": "U8",
    "float8_e3m4": "U8", "float8_e4m3": "U8", "float8_e4m3b11fnuz": "U8", "float6_e2m3fn": "U8", "float6_e3m2fn": "U8",
    "float4_e2m1fn": "U8", "int1": "U8", "int2": "U8", "int4": "U8", "uint1": "U8", "uint2": "U8", "uint4": "U8",
}  # fmt: skip
for _name in ("int1", "uint1"):  # newer than the oldest ml_dtypes that is supported
    if not hasattr(ml_dtypes, _name):
        del STORED_AS[_name]
SHAPES = [(), (1,), (3,), (2, 3), (0,), (2, 0, 3)]


def random_array(dtype, shape, seed=0):
    """Any bits at all, NaN payloads and subnormals among them; a bool is 0 or 1."""
    spec = LeafSpec("", dtype, shape)
    data = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, spec.byte_length, np.uint8)
    return data.view(spec.numpy_dtype).reshape(shape)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def specs_of(leaves):
    return tuple(LeafSpec(path, array.dtype.name, array.shape) for path, array in leaves.items())


def save(path, leaves, *, program="ab" * 32, steps=3, position=None, template=None):
    write_checkpoint(
        path, leaves, program=program, template=template or specs_of(leaves), steps=steps, position=position or {}
    )


SMALL = {"ok": np.array(True), "w": np.array([1, 2], np.float32), "n": np.zeros((0, 2), np.int64)}


@pytest.fixture
def small(tmp_path):
    save(tmp_path / "small", SMALL, position={"epoch": 1})
    return (tmp_path / "small").read_bytes()


def read(data, tmp_path):
    (tmp_path / "read").write_bytes(data)
    return read_checkpoint(tmp_path / "read")


# Round trips.


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    leaves = {f"{dtype}/{shape}": random_array(dtype, shape) for dtype in STORED_AS for shape in SHAPES}
    save(tmp_path / "a", leaves)
    saved = read_checkpoint(tmp_path / "a")
    assert list(saved.leaves) == list(leaves)
    assert saved.template == specs_of(leaves)
    for path, array in leaves.items():
        assert same_bits(saved.leaves[path], array), path
        assert saved.leaves[path].flags.aligned, path
        assert not saved.leaves[path].flags.writeable


def test_other_programs_read_it(tmp_path):
    leaves = {dtype: random_array(dtype, (2, 3)) for dtype in STORED_AS}
    save(tmp_path / "a", leaves)
    found = dict(safetensors.deserialize((tmp_path / "a").read_bytes()))
    assert {name: item["dtype"] for name, item in found.items()} == STORED_AS
    for dtype, array in leaves.items():
        assert found[dtype]["shape"] == ([2, 3, 2] if dtype.startswith("complex") else [2, 3])
        assert bytes(found[dtype]["data"]) == array.tobytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    leaves=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
        st.tuples(st.sampled_from(sorted(STORED_AS)), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99)),
        max_size=6,
    ),
    position=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text('a"\\'),
            lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text("ab"), items, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
    steps=st.integers(0, 2**63),
)
def test_anything_comes_back(tmp_path, leaves, position, steps):
    arrays = {path: random_array(dtype, tuple(shape), seed) for path, (dtype, shape, seed) in leaves.items()}
    save(tmp_path / "a", arrays, steps=steps, position=position)
    saved = read_checkpoint(tmp_path / "a")
    assert (saved.steps, saved.position, saved.template) == (steps, position, specs_of(arrays))
    assert all(same_bits(saved.leaves[path], array) for path, array in arrays.items())
    assert {name for name, _ in safetensors.deserialize((tmp_path / "a").read_bytes())} == set(arrays)


def test_layouts_of_memory(tmp_path):
    grid = np.arange(24, dtype=np.float32).reshape(4, 6)
    big_endian = grid.astype(">f4")
    leaves = {"fortran": np.asfortranarray(grid), "strided": grid[::2, ::-1], "foreign": big_endian}
    write_checkpoint(
        tmp_path / "a",
        leaves,
        program="p",
        steps=0,
        position={},
        template=[LeafSpec(path, "float32", array.shape) for path, array in leaves.items()],
    )
    saved = read_checkpoint(tmp_path / "a").leaves
    for path, array in leaves.items():
        np.testing.assert_array_equal(saved[path], array)


def test_template_order_and_keys_stay(tmp_path):
    template = (LeafSpec("b", "bool", ()), LeafSpec("key", "uint32", (2,), "threefry2x32"), LeafSpec("a", "int8", (1,)))
    save(tmp_path / "a", {spec.path: random_array(spec.dtype, spec.shape) for spec in template}, template=template)
    saved = read_checkpoint(tmp_path / "a")
    assert saved.template == template
    assert list(saved.leaves) == ["b", "key", "a"]


def test_the_name_that_safetensors_keeps_for_itself(tmp_path):
    leaves = {"__metadata__": np.ones(1, np.float32), "__metadata__/": np.zeros(1, np.float32), "": np.array(3)}
    save(tmp_path / "a", leaves)
    saved = read_checkpoint(tmp_path / "a").leaves
    assert all(same_bits(saved[path], array) for path, array in leaves.items())
    names = {name for name, _ in safetensors.deserialize((tmp_path / "a").read_bytes())}
    assert names == {"__metadata__/", "__metadata__//", ""}


def test_golden_bytes(small):
    contents = (
        b'{"version":1,"sha256":"' + b"0" * 64 + b'","program":"' + b"ab" * 32 + b'","steps":3,"position":{"epoch":1},'
        b'"template":[{"path":"ok","dtype":"bool","shape":[],"key":null},'
        b'{"path":"w","dtype":"float32","shape":[2],"key":null},{"path":"n","dtype":"int64","shape":[0,2],"key":null}]}'
    )
    header = b'{"__metadata__":{"fixstep":"' + contents.replace(b'"', b'\\"') + b'"},'
    header += b'"n":{"dtype":"I64","shape":[0,2],"data_offsets":[0,0]},'
    header += b'"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    header += b'"ok":{"dtype":"BOOL","shape":[],"data_offsets":[8,9]}}'
    header += b" " * (-len(header) % 8)
    blank = struct.pack("<Q", len(header)) + header + bytes.fromhex("0000803f 00000040 01")
    assert small == blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode())


def contents_of(data):
    """What the metadata of a file says."""
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return json.loads(header["__metadata__"]["fixstep"])


def resealed(data):
    """The same file with the right SHA-256."""
    digest = contents_of(data)["sha256"].encode()
    blank = data.replace(digest, b"0" * 64, 1)
    return data.replace(digest, hashlib.sha256(blank).hexdigest().encode(), 1)


def test_same_input_same_bytes(tmp_path, small):
    save(tmp_path / "again", SMALL, position={"epoch": 1})
    assert (tmp_path / "again").read_bytes() == small


# Damage.


def test_every_flipped_byte_is_refused(small, tmp_path):
    read(small, tmp_path)
    for position in range(len(small)):
        for mask in (1 << position % 8, 0xFF):
            damaged = bytearray(small)
            damaged[position] ^= mask
            with pytest.raises(CheckpointError):
                read(damaged, tmp_path)


def test_every_truncation_is_refused(small, tmp_path):
    for length in range(len(small)):
        with pytest.raises(CheckpointError):
            read(small[:length], tmp_path)


def with_header(data, change):
    """A file with a changed header, sealed again: wrong on purpose, not by damage."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    body = change(header) or data[8 + length :]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return resealed(struct.pack("<Q", len(text)) + text + body)


def metadata(**values):
    def change(header):
        contents = json.loads(header["__metadata__"]["fixstep"])
        header["__metadata__"]["fixstep"] = json.dumps({**contents, **values})

    return lambda data: with_header(data, change)


def tensor(name, **values):
    return lambda data: with_header(data, lambda header: header.setdefault(name, {}).update(values))


def without(name):
    return lambda data: with_header(data, lambda header: header.pop(name) and None)


def other_metadata(**values):
    return lambda data: safetensors.numpy.save({"w": np.zeros(2)}, values or None)


def template_with(**values):
    leaf = {"path": "w", "dtype": "float32", "shape": [2], "key": None, **values}
    return metadata(template=[leaf])


LIBRARY = "not a whole safetensors file: "  # what follows differs between the versions of the library
BAD = {
    "empty": (lambda data: b"", LIBRARY),
    "short": (lambda data: b"1234567", LIBRARY),
    "huge header": (lambda data: b"\xff" * 100, LIBRARY),
    "long header": (lambda data: struct.pack("<Q", 96) + bytes(92), LIBRARY),
    "no JSON": (lambda data: struct.pack("<Q", 8) + b"hello   ", LIBRARY),
    "cut": (lambda data: data[:-1], LIBRARY),
    "trailing": (lambda data: data + b"\0", LIBRARY),
    "overlap": (tensor("ok", data_offsets=[0, 1]), LIBRARY),
    "hole": (tensor("ok", data_offsets=[9, 10]), LIBRARY),
    "length": (tensor("w", data_offsets=[0, 4]), LIBRARY),
    "no metadata": (other_metadata(), "not a fixstep checkpoint: its metadata has no entry 'fixstep'"),
    "foreign": (other_metadata(format="pt"), "not a fixstep checkpoint: its metadata has no entry 'fixstep'"),
    "contents": (other_metadata(fixstep="1"), "not a fixstep checkpoint: its metadata states no version"),
    "no version": (other_metadata(fixstep="{}"), "not a fixstep checkpoint: its metadata states no version"),
    "contents JSON": (other_metadata(fixstep="{"), "not JSON"),
    "contents NaN": (other_metadata(fixstep='{"a":NaN}'), "NaN is not a JSON number"),
    "twice": (other_metadata(fixstep='{"a":1,"a":1}'), "the key 'a' occurs twice"),
    "deep": (other_metadata(fixstep="[" * 10_000), "nested 10000 deep"),
    "newer": (metadata(version=2), "checkpoint version 2, and this fixstep reads 1: use the fixstep that wrote it"),
    "version": (metadata(version=True), "not a fixstep checkpoint: its metadata states no version"),
    "no digest": (other_metadata(fixstep='{"version":1}'), "damaged: expected a SHA-256 in the metadata, got None"),
    "odd digest": (other_metadata(fixstep='{"version":1,"sha256":"0"}'), "expected a SHA-256 in the metadata, got '0'"),
    "digest": (lambda data: data.replace(b"\x01", b"\x00"), "damaged: expected SHA-256 .*, got "),
    "program": (metadata(program=""), "program: expected a digest, got ''"),
    "steps": (metadata(steps=-1), "steps: expected an integer from 0, got -1"),
    "float steps": (metadata(steps=1.0), "steps: expected an integer from 0, got 1.0"),
    "position": (metadata(position=[]), r"position: expected an object, got \[\]"),
    "template": (metadata(template={}), "template: expected a list, got {}"),
    "no template": (metadata(template=None), "template: expected a list, got None"),
    "template leaf": (metadata(template=[1]), "template/0: expected an object, got 1"),
    "template dtype": (template_with(dtype="float33"), "template/0/dtype: unknown dtype 'float33'"),
    "template shape": (template_with(shape=[2**62, 4]), r"template/0/shape: expected fewer than 2\*\*63 bytes"),
    "template twice": (
        metadata(template=[{"path": "w", "dtype": "float32", "shape": [2], "key": None}] * 2),
        "the leaf path 'w' occurs twice",
    ),
    "missing": (
        metadata(template=[{"path": "x", "dtype": "int4", "shape": [3, 1], "key": None}]),
        r"\n  n: unexpected\n  ok: unexpected\n  w: unexpected\n  x: expected U8\[3,1\], missing",
    ),
    "extra": (tensor("v", dtype="F32", shape=[0], data_offsets=[9, 9]), "v: unexpected"),
    "dtype": (tensor("w", dtype="I32"), r"w: expected F32\[2\], got I32\[2\]"),
    "shape": (tensor("w", shape=[1, 2]), r"w: expected F32\[2\], got F32\[1,2\]"),
    "bool": (lambda data: resealed(data[:-1] + b"\2"), "ok: a bool is neither 0 nor 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named(name, small, tmp_path):
    make, message = BAD[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        read(make(small), tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'read'}: ")


def test_another_layout_of_the_same_content_is_damage_until_it_is_sealed(small, tmp_path):
    def backwards(header):
        for name in [name for name in header if name != "__metadata__"][::-1]:
            header[name] = header.pop(name)

    changed = with_header(small, backwards)
    assert same_bits(read(changed, tmp_path).leaves["w"], SMALL["w"])
    digests = [contents_of(data)["sha256"].encode() for data in (changed, small)]
    with pytest.raises(CheckpointError, match="damaged: expected SHA-256"):
        read(changed.replace(*digests), tmp_path)


def test_a_file_replaced_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "a"
    save(path, SMALL, steps=1)

    def replace_first(path):
        monkeypatch.undo()
        save(path, SMALL, steps=2)
        return _tensors.read_metadata(path)

    monkeypatch.setattr(_checkpoint, "read_metadata", replace_first)
    assert read_checkpoint(path).steps == 2


# Writing.


def test_what_cannot_be_written_is_named(tmp_path):
    path = tmp_path / "a"
    for options, message in [
        ({"position": {"a": {"best": float("inf")}}}, "position/a/best: inf, which JSON cannot hold"),
        ({"position": {"a": [np.int64(1)]}}, "position/a/0: a int64, which JSON cannot hold"),
        ({"position": {"a": {1: 2}}}, "position/a: the key 1 is not text"),
        ({"steps": -1}, "steps: expected an integer from 0, got -1"),
        ({"program": ""}, "program: expected a digest, got ''"),
        ({"template": (LeafSpec("w", "float64", (2,)),)}, r"w: expected float64\[2\], got float32\[2\]"),
        ({"template": (LeafSpec("v", "float32", (2,)),)}, "v: expected .*, missing"),
        ({"template": (LeafSpec("w", "float32", (2,)),) * 2}, "the leaf path 'w' occurs twice"),
    ]:
        with pytest.raises(
            CheckpointError, match=f"{path}: cannot be written: (?s:.*){message}(?s:.*)\nNothing was written"
        ):
            save(path, {"w": np.zeros(2, np.float32)}, **options)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*surrogates"):
        save(path, {"\ud800": np.zeros(2, np.float32)})
    with pytest.raises(CheckpointError, match=f"Make the folder {tmp_path / 'no'} first"):
        save(tmp_path / "no" / "a", SMALL)
    with pytest.raises(CheckpointError, match=r"cannot read it: No such file or directory. Check the path"):
        read_checkpoint(path)
    assert os.listdir(tmp_path) == []


def test_explain_mismatch():
    expected = [
        LeafSpec("a", "float32", (2,)),
        LeafSpec("b", "float32", ()),
        LeafSpec("key", "uint32", (2,), "threefry2x32"),
        LeafSpec("same", "int32", ()),
    ]
    got = [
        LeafSpec("same", "int32", ()),
        LeafSpec("", "int8", (1,)),
        LeafSpec("a", "float16", (2, 1)),
        LeafSpec("key", "uint32", (2,)),
    ]
    assert explain_mismatch(expected, got).splitlines() == [
        "  a: expected float32[2], got float16[2,1]",
        "  key: expected uint32[2] (a threefry2x32 key), got uint32[2]",
        "  b: expected float32[], missing",
        "  <the state itself>: unexpected, got int8[1]",
    ]
    assert explain_mismatch(expected, expected) == ""
    assert explain_mismatch(expected[:2], expected[1::-1]) == "  the same leaves in another order"


def test_the_table_of_dtypes_is_complete():
    names = {name for name in dir(ml_dtypes) if isinstance(getattr(ml_dtypes, name), type)}
    for name in names - STORED_AS.keys():
        try:
            dtype_from_name(name)
        except ValueError:
            continue
        pytest.fail(f"{name} can be a leaf, and no test stores one")
