import json
import os
import sys
import zipfile

import numpy as np
import pytest
from _container import MEMBERS, comment_of, container, described, leaf, manifest_bytes, pairs, small_manifest

from fixstep.runtime._artifact import Artifact, write_artifact
from fixstep.runtime._signature import LeafSpec
from fixstep.runtime._tensors import encode_leaves
from fixstep.targets.errors import ArtifactError


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.fixstep"
    write_artifact(path, small_manifest(), MEMBERS)
    return path.read_bytes()


def test_round_trip(tmp_path, small):
    artifact = Artifact.open(tmp_path / "small.fixstep")
    assert artifact.path == tmp_path / "small.fixstep"
    expected = {"format": "fixstep", "version": 1, **small_manifest(), "members": described(MEMBERS)}
    assert artifact.manifest == expected
    assert {name: bytes(artifact.member(name)) for name in MEMBERS} == MEMBERS
    assert artifact.program == "ab" * 32
    assert artifact.template.state == (
        LeafSpec("params/w", "float32", (2,)),
        LeafSpec("key", "uint32", (2,), "threefry2x32"),
    )
    assert artifact.signature("predict", "inputs") == (LeafSpec("", "float32", (4, 2)),)
    assert artifact.signature("step", "metrics") == (LeafSpec("loss", "float32", ()),)
    (target,) = artifact.targets
    assert (target.text, target.module, target.flags) == ("cpu", "modules/cpu.vmfb", ("--x",))
    assert Artifact.open(small).manifest == expected


def test_what_is_not_there_is_named(small):
    artifact = Artifact.open(small)
    with pytest.raises(KeyError, match="no function 'fit'; there are evaluate, init, predict, step"):
        artifact.signature("fit", "batch")
    with pytest.raises(KeyError, match="predict has no 'batch'; it has inputs, outputs, state"):
        artifact.signature("predict", "batch")
    with pytest.raises(KeyError, match=r"no member 'x'; there are modules/cpu.vmfb, program.mlir"):
        artifact.member("x")


def test_written_bytes_are_the_specified_ones(tmp_path, small):
    with zipfile.ZipFile(tmp_path / "small.fixstep") as file:
        text = file.read("manifest.json")
    assert text.startswith(b'{"format":"fixstep","version":1,"fixpoint":')
    assert small == container([(b"manifest.json", text), *pairs()[1:]])


def test_golden_container():
    from fixstep.runtime._zip import pack

    got = b"".join(pack({"a": b"hi", "b/c": b""}, b"fixstep manifest sha256 " + b"0" * 64))
    first = bytes.fromhex("504b0304 0a00 0000 0000 0000 2100 ac2a93d8 02000000 02000000 0100 2100") + b"a"
    first += bytes.fromhex("35d9 1d00 4000") + bytes(27) + b"hi"
    second = bytes.fromhex("504b0304 0a00 0000 0000 0000 2100 00000000 00000000 00000000 0300 1d00") + b"b/c"
    second += bytes.fromhex("35d9 1900 4000") + bytes(23)
    central = bytes.fromhex(
        "504b0102 1403 0a00 0000 0000 0000 2100 ac2a93d8 02000000 02000000 0100 0000 0000 0000 0000"
    )
    central += bytes.fromhex("0000a481 00000000") + b"a"
    central += bytes.fromhex(
        "504b0102 1403 0a00 0000 0000 0000 2100 00000000 00000000 00000000 0300 0000 0000 0000 0000"
    )
    central += bytes.fromhex("0000a481 42000000") + b"b/c"
    end = bytes.fromhex("504b0506 0000 0000 0200 0200 60000000 80000000 5800") + b"fixstep manifest sha256 " + b"0" * 64
    assert got == first + second + central + end


def test_other_programs_read_it(tmp_path, small):
    with zipfile.ZipFile(tmp_path / "small.fixstep") as file:
        assert file.testzip() is None
        assert file.namelist() == ["manifest.json", *sorted(MEMBERS)]
        assert {name: file.read(name) for name in MEMBERS} == MEMBERS


def test_members_are_aligned_in_the_file_and_in_memory(small):
    artifact = Artifact.open(small)
    for name, data in MEMBERS.items():
        view = artifact.member(name)
        assert view.readonly
        if data:
            assert small.index(data) % 64 == 0
            assert np.asarray(view).ctypes.data % 64 == 0


def test_same_input_same_bytes(tmp_path, small):
    backwards = dict(reversed(small_manifest().items()))
    write_artifact(tmp_path / "again.fixstep", backwards, dict(reversed(MEMBERS.items())))
    assert (tmp_path / "again.fixstep").read_bytes() == small


def test_a_replaced_file_does_not_reach_an_open_artifact(tmp_path, small):
    path = tmp_path / "small.fixstep"
    artifact = Artifact.open(path)
    with open(path, "r+b") as file:
        file.write(b"\xff" * len(small))
        file.truncate(10)
    assert bytes(artifact.member("modules/cpu.vmfb")) == MEMBERS["modules/cpu.vmfb"]
    changing = bytearray(small)
    artifact = Artifact.open(changing)
    changing[:] = bytes(len(small))
    assert bytes(artifact.member("modules/cpu.vmfb")) == MEMBERS["modules/cpu.vmfb"]


def test_initial_state(tmp_path):
    manifest = small_manifest()
    del manifest["functions"]["init"]
    specs = (LeafSpec("params/w", "float32", (2,)), LeafSpec("key", "uint32", (2,)))
    leaves = {"params/w": np.array([1, 2], np.float32), "key": np.array([3, 4], np.uint32)}
    members = {**MEMBERS, "state.safetensors": encode_leaves(leaves, specs)}
    write_artifact(tmp_path / "a", manifest, members)
    state = Artifact.open(tmp_path / "a").initial_state()
    assert list(state) == ["params/w", "key"]
    for path, array in leaves.items():
        np.testing.assert_array_equal(state[path], array)
    with pytest.raises(ArtifactError, match=r"neither init nor a member state.safetensors"):
        write_artifact(tmp_path / "b", manifest, MEMBERS)
    members["state.safetensors"] = encode_leaves({"w": np.zeros(2, np.float32)}, (LeafSpec("w", "float32", (2,)),))
    with pytest.raises(ArtifactError, match=r"state.safetensors: .*\n  key: expected U32\[2\], missing\n"):
        Artifact.open(container(pairs(manifest, members)))
    members["state.safetensors"] = encode_leaves(leaves, specs)[:-1]
    with pytest.raises(ArtifactError, match=r"state.safetensors: not a whole safetensors file: "):
        Artifact.open(container(pairs(manifest, members)))


# Damage.


def test_every_flipped_byte_is_refused(small):
    assert Artifact.open(small)
    for position in range(len(small)):
        for mask in (1 << position % 8, 0xFF):
            damaged = bytearray(small)
            damaged[position] ^= mask
            with pytest.raises(ArtifactError, match="copy it again"):
                Artifact.open(damaged)


def test_every_truncation_is_refused(small):
    for length in range(len(small)):
        with pytest.raises(ArtifactError, match="copy it again"):
            Artifact.open(small[:length])


def swapped(data, old, new):
    assert old in data
    return data.replace(old, new)


def repacked(data, method):
    """What `unzip` and `zip` would make of it."""
    import io

    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.comment = old.comment
    return out.getvalue()


def named(name):
    return [*pairs(), (name, b"data")]


DAMAGE = {
    "empty": (lambda data: b"", "the file is empty"),
    "foreign": (lambda data: b"\x7fELF" + bytes(200), r"not a fixstep artifact: it starts with b'\\x7fELF'"),
    "a zip": (lambda data: container(pairs(), comment=b"hello"), "a zip file that fixstep did not write"),
    "cut": (lambda data: data[:-100], "was the file cut short"),
    "cut in the comment": (lambda data: data[:-3], "the end record was cut short"),
    "trailing": (lambda data: data + b"\0\0\0", "3 bytes follow the end record"),
    "leading": (lambda data: b"\0" + data, "the end record places the directory"),
    "inserted": (lambda data: swapped(data, b"module {}\n", b"module  {}\n"), "the end record places the directory"),
    "packed again": (lambda data: repacked(data, zipfile.ZIP_STORED), "is listed at"),
    "deflated again": (lambda data: repacked(data, zipfile.ZIP_DEFLATED), r"is compressed \(method 8\)"),
    "deflated": (lambda data: container(pairs(), method=8), r"'manifest.json': is compressed \(method 8\)"),
    "encrypted": (lambda data: container(pairs(), flags=1), "is encrypted"),
    "flags": (lambda data: container(pairs(), flags=8), "has the flags 0x0008"),
    "link": (lambda data: container(pairs(), mode=0o120777), "is a symbolic link"),
    "mode": (lambda data: container(pairs(), mode=0o100755), r"the directory, bytes \d+ to \d+, is damaged"),
    "padding": (lambda data: container(pairs(), padding=b"x"), "the header of the member 'manifest.json', bytes 0 to"),
    "zip64 member": (lambda data: container(pairs(), sizes=(0xFFFFFFFF,) * 2), "zip64"),
    "absurd size": (lambda data: container(pairs(), sizes=(0xFFFFFFF0,) * 2), "is listed at"),
    "two sizes": (lambda data: container(pairs(), sizes=(1, 2)), "is listed with 1 and 2 bytes"),
    "zip64": (lambda data: container(pairs(), end={"here": 0xFFFF, "count": 0xFFFF}), "zip64"),
    "disks": (lambda data: container(pairs(), end={"disk": 1}), "several disks"),
    "start disk": (lambda data: container(pairs(), end={"start": 1}), "several disks"),
    "many": (lambda data: container(pairs(), end={"here": 5000, "count": 5000}), "expected 1 to 1024"),
    "count": (lambda data: container(pairs(), end={"here": 5, "count": 5}), "the directory ends within entry 4"),
    "few": (lambda data: container(pairs(), end={"here": 3, "count": 3}), "bytes more than its 3 entries"),
    "two counts": (lambda data: container(pairs(), end={"here": 4, "count": 3}), "counts 4 and 3 members"),
    "gap": (lambda data: container(pairs(), gap=b"payload"), "7 bytes after the last member belong to none"),
    "beyond": (
        lambda data: container([(b"manifest.json", b"{}")], sizes=(1000, 1000)),
        "'manifest.json' is listed at 0, expected 0 to 1064 before 66",
    ),
    "offset": (lambda data: container(pairs(), end={"offset": 7}), "places the directory at 7"),
    "far": (lambda data: container(pairs(), end={"offset": 0xFFFFFFF0}), "places the directory at 4294967280"),
    "missing": (lambda data: container(pairs()[:-1]), r"reference/step.jax: expected 0 bytes, missing"),
    "extra": (lambda data: container(named(b"more")), "more: unexpected, 4 bytes"),
    "duplicate": (lambda data: container(named(b"program.mlir")), "'program.mlir' occurs twice"),
    "case": (lambda data: container(named(b"Program.mlir")), "'Program.mlir' and 'program.mlir' differ only in case"),
    "parent": (lambda data: container(named(b"../x")), r"the member '../x': the name is not a plain relative path"),
    "inner parent": (lambda data: container(named(b"a/../x")), "not a plain relative path"),
    "absolute": (lambda data: container(named(b"/etc/passwd")), "not a plain relative path"),
    "drive": (lambda data: container(named(b"C:x")), "not a plain relative path"),
    "backslash": (lambda data: container(named(b"a\\b")), "not a plain relative path"),
    "NUL": (lambda data: container(named(b"program.mlir\0.txt")), "not a plain relative path"),
    "newline": (lambda data: container(named(b"a\n")), "not a plain relative path"),
    "folder": (lambda data: container(named(b"a/")), "not a plain relative path"),
    "no name": (lambda data: container(named(b"")), "not a plain relative path"),
    "dots": (lambda data: container(named(b"a./b")), "not a plain relative path"),
    "non-ASCII": (lambda data: container(named("é".encode())), "the name is not ASCII"),
    "long name": (lambda data: container(named(b"a" * 256)), "longer than 255 characters"),
    "order": (lambda data: container(pairs()[::-1]), "the first member is 'reference/step.jax'"),
    "other data": (lambda data: container([*pairs()[:-1], (b"reference/step.jax", b"x")]), "expected 0 bytes, got 1"),
    "swapped data": (
        lambda data: container([*pairs()[:2], (b"program.mlir", b"MODULE {}\n"), pairs()[3]]),
        "program.mlir: expected SHA-256 .*, got ",
    ),
    "manifest": (lambda data: container(pairs(), comment=comment_of(b"other")), "does not have the SHA-256"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name, small, tmp_path):
    make, message = DAMAGE[name]
    path = tmp_path / "bad.fixstep"
    path.write_bytes(make(small))
    with pytest.raises(ArtifactError, match=message) as caught:
        Artifact.open(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "copy it again" in str(caught.value)


# The manifest.


def changed(path, value=...):
    """A change of the manifest: the item at `path` becomes `value`, or goes."""

    def change(manifest):
        *parents, last = path.split("/")
        item = manifest
        for key in parents:
            item = item[int(key) if isinstance(item, list) else key]
        last = int(last) if isinstance(item, list) else last
        if value is ...:
            del item[last]
        else:
            item[last] = value

    return change


def twice(manifest):
    manifest["template"]["state"] *= 2


def more_targets(manifest):
    manifest["targets"] *= 2


MANIFEST = {
    "newer": (changed("version", 2), "version 2, and this fixstep reads 1: upgrade fixstep"),
    "older": (changed("version", 0), "version 0, and this fixstep reads 1: compile it again"),
    "bool version": (changed("version", True), "version True, and this fixstep reads 1"),
    "format": (changed("format", "other"), "the manifest's format is 'other', expected 'fixstep'"),
    "name": (changed("name", 3), "/name: expected text, got 3"),
    "empty name": (changed("name", ""), "/name: expected 1 to 4096 characters, got ''"),
    "no program": (changed("program"), "/program: expected a SHA-256, missing"),
    "program": (changed("program", "AB" * 32), "/program: expected 64 lowercase hexadecimal digits"),
    "template": (changed("template", []), r"/template: expected an object, got \[\]"),
    "role": (changed("template/batches", []), "/template: unknown key 'batches', expected state, batch, inputs"),
    "no inputs": (changed("template/inputs"), "/template/inputs: expected a list, missing"),
    "leaf": (changed("template/state/0", 1), "/template/state/0: expected an object, got 1"),
    "leaf key": (changed("template/state/0/offset", 1), "/template/state/0: unknown key 'offset'"),
    "path": (changed("template/state/0/path", None), "/template/state/0/path: expected text, got None"),
    "NUL path": (changed("template/state/0/path", "a\0"), "/template/state/0/path: expected a leaf path"),
    "dtype": (changed("template/state/0/dtype", "float33"), "/template/state/0/dtype: unknown dtype 'float33'"),
    "odd dtype": (changed("template/state/0/dtype", "f4,f4"), "/dtype: expected the name of a dtype, got 'f4,f4'"),
    "object dtype": (changed("template/state/0/dtype", "object"), "/dtype: expected the name of a dtype"),
    "shape": (changed("template/state/0/shape", [-1]), r"/shape: expected up to 32 integers .*, got \[-1\]"),
    "bool shape": (changed("template/state/0/shape", [True]), r"/shape: expected up to 32 integers .*, got \[True\]"),
    "float shape": (changed("template/state/0/shape", [2.0]), r"/shape: expected up to 32 integers .*, got \[2.0\]"),
    "rank": (changed("template/state/0/shape", [1] * 33), "/shape: expected up to 32 integers"),
    "absurd shape": (changed("template/state/0/shape", [2**40, 2**40]), r"expected fewer than 2\*\*63 bytes"),
    "key": (changed("template/state/0/key", 1), "/key: expected null or the name of a PRNG implementation, got 1"),
    "no key": (changed("template/state/0/key"), "/key: expected null or the name of a PRNG implementation, missing"),
    "bool in a known shape": (
        changed("functions/step/results/2/leaves", [leaf("a", shape=(1,)), leaf("b", shape=(True,))]),
        r"/leaves/1/shape: expected up to 32 integers .*, got \[True\]",
    ),
    "other key in a known leaf": (
        changed("functions/step/arguments/0/leaves/0", {**leaf("params/w"), "keys": None}),
        "/leaves/0: unknown key 'keys'",
    ),
    "same path": (twice, "/template/state: the leaf path 'params/w' occurs twice"),
    "function": (changed("functions/fit", {}), "unknown function 'fit', expected init, step, evaluate, predict"),
    "no step": (changed("functions/step"), "/functions: step is missing"),
    "roles": (
        changed("functions/predict/arguments/1/role", "batch"),
        "/functions/predict/arguments: expected the roles state, inputs, got state, batch",
    ),
    "no results": (changed("functions/step/results"), "/functions/step/results: expected a list, missing"),
    "other batch": (
        changed("functions/step/arguments/2/leaves/0/dtype", "int32"),
        "/functions/step/arguments: batch differs from the template's",
    ),
    "other state": (
        changed("functions/init/results/0/leaves", []),
        "/functions/init/results: state differs from the template's",
    ),
    "sums": (
        changed("functions/evaluate/results/0/leaves/0/dtype", "float64"),
        "/functions/evaluate: the accumulators of arguments and results differ",
    ),
    "no targets": (changed("targets", []), "/targets: expected at least one target, got none"),
    "same target": (more_targets, "/targets: 'cpu' occurs twice"),
    "module": (changed("targets/0/module", "x"), "/targets: the module 'x' of 'cpu' is no member"),
    "flags": (changed("targets/0/flags", [1]), "/targets/0/flags/0: expected text, got 1"),
    "requires": (changed("targets/0/requires", None), "/targets/0/requires: expected an object, got None"),
    "rounds": (changed("fixpoint/rounds", -1), "/fixpoint/rounds: expected an integer from 0"),
    "narrowed": (changed("fixpoint/changes/0/narrowed", 0), "/fixpoint/changes/0/narrowed: expected true or false"),
    "notes": (changed("fixpoint/notes", "none"), "/fixpoint/notes: expected a list, got 'none'"),
    "versions": (changed("versions/jax", 1), "/versions/jax: expected text, got 1"),
    "length": (changed("members/program.mlir/byte_length", -1), "/byte_length: expected an integer from 0"),
    "digest": (changed("members/program.mlir/sha256", "0"), "/sha256: expected 64 lowercase hexadecimal digits"),
    "member": (changed("members/program.mlir/crc", 0), "/members/program.mlir: unknown key 'crc'"),
}


@pytest.mark.parametrize("name", MANIFEST)
def test_every_field_is_checked(name):
    change, message = MANIFEST[name]
    manifest = json.loads(manifest_bytes())  # no part is shared with another
    change(manifest)
    text = json.dumps(manifest).encode()
    with pytest.raises(ArtifactError, match=f"<bytes>: manifest.json: (?s:.*){message}"):
        Artifact.open(container([(b"manifest.json", text), *pairs()[1:]]))


def test_all_problems_at_once():
    manifest = small_manifest()
    manifest["name"], manifest["program"] = 1, 2
    manifest["targets"] = [None] * 30
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(container(pairs(manifest)))
    message = str(caught.value)
    assert "/name: expected text, got 1" in message
    assert "/program: expected a SHA-256, got 2" in message
    assert "and 12 more" in message
    assert message.endswith("Compile it again with this version of fixstep.")


JSON = {
    "list": (b"[]", "the manifest's format is 'list'"),
    "syntax": (b"{", "not JSON"),
    "UTF-8": (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
    "twice": (b'{"format": "fixstep", "format": "fixstep"}', "the key 'format' occurs twice in one object"),
    "NaN": (b'{"a": NaN}', "NaN is not a JSON number"),
    "infinite": (b'{"a": 1e999}', "1e999 is no finite number"),
    "deep": (b"[" * 33 + b"]" * 33, "nested 33 deep, more than the 32"),
    "very deep": (b"[" * 1_000_000, "nested 1000000 deep"),
    "long integer": (b"[" + b"1" * 5000 + b"]", "integer"),
    "deep in text": (b'["' + b"[" * 100 + b'"]', "the manifest's format is 'list'"),
}


@pytest.mark.parametrize("name", JSON)
def test_json_is_strict(name):
    text, message = JSON[name]
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(container([(b"manifest.json", text)]))


def test_unknown_keys_of_the_manifest_are_ignored():
    manifest = {**small_manifest(), "later": {"a": 1}}
    assert Artifact.open(container(pairs(manifest))).manifest["later"] == {"a": 1}


# Writing.


def test_a_manifest_that_cannot_be_read_is_not_written(tmp_path):
    path = tmp_path / "a.fixstep"
    manifest = small_manifest()
    manifest["targets"][0]["module"] = "modules/other.vmfb"
    with pytest.raises(
        ArtifactError, match=r"the module 'modules/other.vmfb' of 'cpu' is no member\nNothing was written"
    ):
        write_artifact(path, manifest, MEMBERS)
    with pytest.raises(ArtifactError, match="manifest/later: a float32, which JSON cannot hold"):
        write_artifact(path, {**small_manifest(), "later": np.float32(1)}, MEMBERS)
    with pytest.raises(ArtifactError, match="manifest/later: nan, which JSON cannot hold"):
        write_artifact(path, {**small_manifest(), "later": float("nan")}, MEMBERS)
    with pytest.raises(ArtifactError, match=r"bad member names: '../x': not a plain relative path"):
        write_artifact(path, small_manifest(), {**MEMBERS, "../x": b""})
    with pytest.raises(ArtifactError, match=r"manifest.json is made from the manifest"):
        write_artifact(path, small_manifest(), {**MEMBERS, "manifest.json": b""})
    with pytest.raises(ArtifactError, match="1025 members, expected 1 to 1024"):
        write_artifact(path, small_manifest(), {**MEMBERS, **{f"x{i}": b"" for i in range(1021)}})
    assert os.listdir(tmp_path) == []


def test_the_manifest_given_is_not_changed(tmp_path):
    manifest = small_manifest()
    returned = write_artifact(tmp_path / "a", manifest, MEMBERS)
    assert manifest == small_manifest()
    assert returned == Artifact.open(tmp_path / "a").manifest


@pytest.mark.skipif(sys.platform == "win32", reason="the paths are POSIX")
def test_places_that_cannot_be_read_or_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    for path, message in [
        (tmp_path / "no" / "a", f"No such file or directory. Make the folder {tmp_path / 'no'} first"),
        (tmp_path, "It is a folder: give the name of a file"),
        (tmp_path / "file" / "a", "A part of the path is a file"),
        (tmp_path / "pipe", "Give the name of an ordinary file"),
        (tmp_path / ("a" * 300), "Use a shorter name"),
    ]:
        with pytest.raises(ArtifactError, match=f"{path}: cannot write it: .*{message}") as caught:
            write_artifact(path, small_manifest(), MEMBERS)
        assert isinstance(caught.value.__cause__, OSError)
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]
    for path, message in [
        (tmp_path / "no", "No such file or directory. Check the path"),
        (tmp_path, "It is a folder"),
        (tmp_path / "pipe", "not an ordinary file"),
    ]:
        with pytest.raises(ArtifactError, match=f"{path}: cannot read it: .*{message}"):
            Artifact.open(path)


@pytest.mark.skipif(sys.platform == "win32", reason="sparse files need a seek on POSIX")
def test_an_absurdly_large_file_is_not_read(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        file.truncate(2**33)
    with pytest.raises(ArtifactError, match="8589934592 bytes, more than the 4294967294 an artifact may have"):
        Artifact.open(tmp_path / "a")


def test_a_link_is_followed_when_writing(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "a")
    write_artifact(tmp_path / "link", small_manifest(), MEMBERS)
    assert (tmp_path / "link").is_symlink()
    assert Artifact.open(tmp_path / "runs" / "a")
