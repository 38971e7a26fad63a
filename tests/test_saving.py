"""Files that are whole or absent: atomic writing, processes that die, disks that are full, folders of checkpoints."""

import os
import re
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

from fixstep.runtime import _files
from fixstep.runtime._checkpoint import CheckpointDirectory, read_checkpoint, write_checkpoint
from fixstep.runtime._signature import LeafSpec
from fixstep.targets.errors import CheckpointError

SMALL = {"w": np.array([1, 2], np.float32)}


def save(path, leaves, *, steps=3):
    template = [LeafSpec(name, array.dtype.name, array.shape) for name, array in leaves.items()]
    write_checkpoint(path, leaves, program="p", template=template, steps=steps, position={})


@pytest.mark.parametrize("code", sorted(_files._ADVICE))
def test_every_refusal_of_the_system_has_advice(code, tmp_path):
    exc = OSError(code, os.strerror(code))
    message = _files.explain_os_error("write", tmp_path / "a", exc)
    assert message.startswith(f"{tmp_path / 'a'}: cannot write it: {os.strerror(code)}. ")
    assert message.endswith("What was there before is unchanged.")


def test_an_error_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _files.write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_the_disk_has_the_data_before_the_name_and_then_the_name(tmp_path, monkeypatch):
    calls = []
    kind = {True: "folder", False: "file"}
    fsync, replace = os.fsync, os.replace

    def record_fsync(handle):
        calls.append(f"fsync {kind[stat.S_ISDIR(os.fstat(handle).st_mode)]}")
        fsync(handle)

    def record_replace(old, new):
        calls.append(f"rename, {os.path.getsize(old)} bytes")
        replace(old, new)

    monkeypatch.setattr(_files.os, "fsync", record_fsync)
    monkeypatch.setattr(_files.os, "replace", record_replace)
    _files.write_atomically(tmp_path / "a", lambda file: file.write(b"data"))
    assert calls == ["fsync file", "rename, 4 bytes", "fsync folder"]


# Processes that die and disks that are full.

CHILD = """
import os, signal, sys
import numpy as np
from pathlib import Path
from fixstep.runtime import _files
from fixstep.runtime._checkpoint import CheckpointDirectory, write_checkpoint
from fixstep.runtime._signature import LeafSpec

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

folder, element_count = Path(sys.argv[1]), int(sys.argv[2])
template = [LeafSpec("w", "float32", (element_count,)), LeafSpec("v", "float32", (element_count,))]
files = CheckpointDirectory(folder)

def save(step):
    leaves = {spec.path: np.full(spec.shape, step, np.float32) for spec in template}
    files.save(step, lambda path: write_checkpoint(
        path, leaves, program="p", template=template, steps=step, position={"step": step}))
    files.prune(2)

"""


def child(code, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def check_newest(folder, at_least):
    """The newest checkpoint is whole, of one step, and not older than `at_least`."""
    latest = CheckpointDirectory(folder).latest()
    assert latest.notes == ()
    saved = read_checkpoint(latest.path)
    assert saved.steps >= at_least
    assert saved.position == {"step": saved.steps}
    assert all(set(array.tolist()) == {float(saved.steps)} for array in saved.leaves.values())
    return saved.steps


KILLED_AT = {
    "half written": "_files.os.fsync = die",
    "before the rename": "_files.os.replace = die",
    "after the rename": "_files.sync_folder = die",
    "before pruning": "CheckpointDirectory.prune = die",
    "amid pruning": "Path.unlink = die",
}


@pytest.mark.parametrize("moment", KILLED_AT)
def test_killed_at_a_moment(moment, tmp_path):
    with child(f"save(1); save(2)\n{KILLED_AT[moment]}\nsave(3)\nprint('alive')", tmp_path, 100) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (-signal.SIGKILL, "", "")
    renamed = moment not in ("half written", "before the rename")
    assert check_newest(tmp_path, 2) == (3 if renamed else 2)
    others = [name for name in os.listdir(tmp_path) if not name.endswith(".safetensors")]
    assert len(others) == (0 if renamed else 1)
    assert all(_files._PARTIAL.fullmatch(name) for name in others)


def test_killed_in_the_middle_of_saving_in_a_loop(tmp_path):
    code = "step = int(sys.argv[3])\nwhile True:\n    step += 1\n    save(step)\n    print(step, flush=True)"
    rng = np.random.default_rng(0)
    step = 0
    for _ in range(6):
        with child(code, tmp_path, 300_000, step) as process:
            step = int(process.stdout.readline())
            time.sleep(float(rng.uniform(0, 0.05)))
            process.kill()
            step = max([step, *map(int, process.stdout.read().split())])
        step = check_newest(tmp_path, step)
    assert len([name for name in os.listdir(tmp_path) if name.endswith(".safetensors")]) <= 3


def test_leftovers_are_removed_once_they_are_old(tmp_path):
    old, fresh, other = (tmp_path / f".fixstep-{digit * 16}.partial" for digit in "01x")
    for path in (old, fresh, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    CheckpointDirectory(tmp_path).save(1, lambda path: save(path, SMALL))
    assert sorted(os.listdir(tmp_path)) == [fresh.name, other.name, "step-00000001.safetensors"]


def test_a_file_over_the_limit_leaves_the_old_one(tmp_path):
    code = (
        "save(1)\nimport resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from fixstep.targets.errors import CheckpointError\n"
        "template[:] = [LeafSpec('w', 'float32', (50_000,))]\n"
        "try:\n    save(2)\nexcept CheckpointError as exc:\n    print(exc)"
    )
    with child(code, tmp_path, 1000) as process:
        out, err = process.communicate(timeout=60)
    assert err == ""
    assert re.search(
        r"step-00000002.safetensors: cannot write it: File too large. The system limits the size of files here.*"
        "What was there before is unchanged",
        out,
    )
    assert os.listdir(tmp_path) == ["step-00000001.safetensors"]
    check_newest(tmp_path, 1)


@pytest.fixture
def little_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = sys.platform == "linux" and os.geteuid() == 0
    if mounted:
        command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("this process may not mount a file system; the limit on the size of files is tested without one")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_old_file(little_disk):
    path = little_disk / "a"
    old = {"w": np.ones(20_000, np.float32)}
    save(path, old)
    with pytest.raises(
        CheckpointError, match=f"{path}: cannot write it: No space left on device. Free some space"
    ) as caught:
        save(path, {"w": np.zeros(60_000, np.float32)})
    assert isinstance(caught.value.__cause__, OSError)
    assert os.listdir(little_disk) == ["a"]
    assert (read_checkpoint(path).leaves["w"] == old["w"]).all()


# The folder.


def test_a_folder_of_checkpoints(tmp_path):
    files = CheckpointDirectory(tmp_path / "runs" / "a")
    assert files.latest().path is None
    assert files.files() == []
    paths = [files.save(step, lambda path: save(path, SMALL)) for step in (1, 120, 99_999_999, 123_456_789)]
    assert [path.name for path in paths] == [
        "step-00000001.safetensors",
        "step-00000120.safetensors",
        "step-99999999.safetensors",
        "step-123456789.safetensors",
    ]
    (tmp_path / "runs" / "a" / "notes.txt").write_text("mine")
    (tmp_path / "runs" / "a" / "step-7.safetensors").write_text("mine")
    assert files.files() == paths[::-1]
    assert CheckpointDirectory(tmp_path / "runs" / "a").latest().path == paths[-1]
    files.prune(2)
    assert files.files() == paths[:1:-1]
    assert len(os.listdir(tmp_path / "runs" / "a")) == 4


def test_a_damaged_newest_is_passed_over(tmp_path):
    files = CheckpointDirectory(tmp_path / "runs")
    paths = [files.save(step, lambda path: save(path, SMALL)) for step in (1, 2, 3)]
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    paths[1].write_bytes(b"")
    latest = CheckpointDirectory(tmp_path / "runs").latest()
    assert latest.path == paths[0]
    assert [str(path) in note for path, note in zip(paths[:0:-1], latest.notes, strict=True)] == [True, True]
    assert "not a whole safetensors file" in latest.notes[1]
    paths[0].unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in the folder can be read:\n.*step-00000003(?s:.*)step-00000002"
    ):
        CheckpointDirectory(tmp_path / "runs").latest()


def test_pruning_counts_whole_checkpoints_only(tmp_path):
    files = CheckpointDirectory(tmp_path)
    paths = [files.save(step, lambda path: save(path, SMALL)) for step in (1, 2, 3, 9)]
    paths[-1].write_bytes(b"damaged")
    resumed = CheckpointDirectory(tmp_path)
    assert resumed.latest().path == paths[2]
    fourth = resumed.save(4, lambda path: save(path, SMALL))
    resumed.prune(2)
    assert resumed.files() == [paths[3], fourth, paths[2]]
    resumed.prune(1)
    assert fourth in resumed.files()
    with pytest.raises(ValueError, match="keep: expected at least 1 checkpoint, got 0"):
        resumed.prune(0)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'file' / 'runs'}: cannot make it: Not a directory"):
        CheckpointDirectory(tmp_path / "file" / "runs").save(1, lambda path: save(path, SMALL))
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'file'}: cannot read it: Not a directory"):
        CheckpointDirectory(tmp_path / "file").latest()


def test_a_failed_save_keeps_what_was_there(tmp_path):
    files = CheckpointDirectory(tmp_path)
    first = files.save(1, lambda path: save(path, SMALL))
    with pytest.raises(CheckpointError, match="steps: expected"):
        files.save(2, lambda path: save(path, SMALL, steps=-1))
    assert files.latest().path == first
