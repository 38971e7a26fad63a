"""The commands run, inspect and predict, as a user types them; and real processes that are stopped and resumed."""

import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fixstep.runtime import _cli
from fixstep.runtime._checkpoint import read_checkpoint
from fixstep.runtime._cli import main
from fixstep.runtime._load import load

START = "import sys; from fixstep.runtime._cli import main; sys.exit(main())"


def save_data(path, examples, **others):
    x = np.random.default_rng(0).standard_normal((examples, 4)).astype(np.float32)
    np.savez(path, x=x, y=(x @ np.ones((4, 3))).astype(np.float32), **others)


@pytest.fixture
def folder(tmp_path, tiny_artifact, monkeypatch):
    """The current directory, with an artifact and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FIXSTEP_DEBUG", raising=False)
    os.link(tiny_artifact, "tiny.fixstep")
    save_data("train.npz", 51)
    save_data("test.npz", 19)
    return tmp_path


def run(*arguments):
    return main(["run", "tiny.fixstep", "--data", "train.npz", *arguments])


# --- run


def test_run_says_what_it_does(folder, capsys):
    assert run("--validate", "test.npz", "--epochs", "2", "--checkpoint-dir", "runs/a", "--log", "m.csv") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny on cpu (")
    assert lines[1] == "51 examples, 6 batches of 8 an epoch, shuffled with seed 0"
    assert lines[2] == "training: 3 examples do not fill a batch and are left out of each epoch"
    assert lines[3] == "validation: 3 examples do not fill a batch and are left out of each epoch"
    assert lines[4].startswith("epoch 1/2  step 6  loss ")
    assert lines[5].startswith("epoch 2/2  step 12  loss ")
    assert lines[6] == "done: 12 steps, 2 whole epochs; checkpoint runs/a/step-00000012.safetensors"
    assert len((folder / "m.csv").read_text().splitlines()) == 3


def test_quiet(folder, capsys):
    assert run("--quiet", "--checkpoint-dir", "a") == 0
    assert capsys.readouterr() == ("", "")


def test_resume_goes_on(folder, capsys):
    assert run("--checkpoint-dir", "a", "--resume", "--max-steps", "8") == 0
    out = capsys.readouterr().out
    assert "no checkpoint in a, starts anew" in out
    assert "done: 8 steps, 1 whole epoch; stopped at --max-steps, so far loss " in out
    assert run("--checkpoint-dir", "a", "--resume") == 0
    assert "resumes from a/step-00000008.safetensors" in capsys.readouterr().out
    assert run("--checkpoint-dir", "b") == 0
    name = "step-00000018.safetensors"
    assert (folder / "a" / name).read_bytes() == (folder / "b" / name).read_bytes()


def test_seed_chooses_state_and_order(folder):
    for name, options in {"a": ["--seed", "1"], "b": ["--seed", "1"], "c": ["--seed", "2"], "d": []}.items():
        assert run("--quiet", "--epochs", "1", "--checkpoint-dir", name, *options) == 0
    a, b, c, d = (read_checkpoint(folder / n / "step-00000006.safetensors").leaves["w"].tolist() for n in "abcd")
    assert a == b
    assert a != c
    assert a != d


def test_data_from_a_function(folder, capsys):
    (folder / "mydata.py").write_text(
        "import numpy as np\n"
        "def batches(epoch):\n"
        "    arrays = np.load('train.npz')\n"
        "    for i in range(6):\n"
        "        yield {k: arrays[k][8 * i : 8 * i + 8] for k in ('x', 'y')}\n"
    )
    assert main(["run", "tiny.fixstep", "--data", "mydata:batches", "--checkpoint-dir", "a", "-q"]) == 0
    assert run("--no-shuffle", "--checkpoint-dir", "b", "-q") == 0
    one, two = (read_checkpoint(folder / n / "step-00000018.safetensors").leaves["w"].tolist() for n in "ab")
    assert one == two


def test_a_seed_without_init_is_that_of_the_order(tmp_path, tiny_program, folder):
    import dataclasses

    from fixstep.frontend import compile

    state = {"w": np.zeros((4, 3), np.float32), "steps": np.int32(0)}
    compile(dataclasses.replace(tiny_program, init=state), "fixed.fixstep", targets=["cpu"])
    weights = []
    for seed in ("1", "2"):
        options = ["--epochs", "1", "--checkpoint-dir", seed, "--seed", seed, "-q"]
        assert main(["run", "fixed.fixstep", "--data", "train.npz", *options]) == 0
        weights.append(read_checkpoint(f"{seed}/step-00000006.safetensors").leaves["w"].tolist())
    assert weights[0] != weights[1]


def _poison():
    arrays = dict(np.load("train.npz"))
    arrays["x"][10] = np.inf
    np.savez("train.npz", **arrays)


def _run_once():
    run("--quiet", "--epochs", "1", "--checkpoint-dir", "runs", "--log", "m.csv")


@pytest.mark.parametrize(
    ("prepare", "arguments", "code", "text"),
    [
        (None, ["--validate", "absent.npz"], 2, r"absent.npz: no such file"),
        (None, ["--validate", "absent:f"], 2, "no module 'absent' (of the data source 'absent:f') here"),
        (lambda: save_data("train.npz", 51, label=np.zeros(51)), [], 2,
         "--data train.npz: the batch does not fit the template:\n  label: unexpected, got float64[8]"),
        (lambda: save_data("train.npz", 5), [], 2, "--data train.npz: 5 examples do not fill one batch of 8"),
        (_run_once, ["--checkpoint-dir", "runs"], 2, "runs already holds checkpoints, the newest step-00000006"),
        (_run_once, ["--checkpoint-dir", "runs", "--resume", "--seed", "9"], 2, "  seed: expected 0, got 9\nResume"),
        (_run_once, ["--log", "m.csv"], 2, "m.csv already exists: continue that run with"),
        (None, ["--log", "m.txt"], 2, "m.txt: expected a metrics file that ends in .csv or .jsonl"),
        (None, ["--resume"], 2, "--resume needs --checkpoint-dir, the folder of the checkpoints"),
        (None, ["--checkpoint-every", "3"], 2, "--checkpoint-every needs --checkpoint-dir"),
        (None, ["--watch", "accuracy"], 2, "the step has no metric 'accuracy' to watch; it has loss"),
        (None, ["--target", "warp"], 2, "the artifact has no code for target 'warp'; it was compiled for cpu"),
        (_poison, ["--no-shuffle"], 1, "loss became nan at epoch 1, batch 2 (step 2); the step was undone"),
    ],
)  # fmt: skip
def test_run_refuses(folder, capsys, prepare, arguments, code, text):
    if prepare:
        prepare()
    assert run(*arguments) == code
    error = capsys.readouterr().err
    assert error.startswith("fixstep: error: ")
    assert text in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--epochs", "-1"], "argument --epochs: expected an integer from 0, got '-1'"),
        (["--validate-every", "0"], "argument --validate-every: expected an integer of at least 1, got '0'"),
        (["--reduce-factor", "nan"], "argument --reduce-factor: expected a number from 0, got 'nan'"),
        (["--early-stop", "max:"], "argument --early-stop: expected the name of a metric, such as validation/loss"),
        (["--seed", "-1"], "argument --seed: expected"),
        (["--seed", "1e3"], "argument --seed: expected an integer from 0 to 2^64 - 1, got '1e3'"),
        (["--on-nonfinite", "panic"], "argument --on-nonfinite: invalid choice: 'panic'"),
        (["--batch-size", "3"], "--batch-size 3: the artifact takes 8 alone"),
        (["--learning-rate", "3"], "unrecognized arguments: --learning-rate 3"),
    ],
)
def test_run_options(folder, capsys, arguments, text):
    assert run(*arguments) == 2
    assert text in capsys.readouterr().err


def test_skipping_is_told(folder, capsys):
    _poison()
    assert run("--no-shuffle", "--on-nonfinite", "skip") == 0
    assert "batches skipped, because the watched metric was not finite: 3" in capsys.readouterr().out


# --- real processes


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", START, "run", "tiny.fixstep", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def newest_step(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return max((int(name[5:13]) for name in names if name.startswith("step-")), default=-1)


def wait_for(condition, process):
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.002)


LONG = ("--data", "long.npz", "--epochs", "40", "--checkpoint-every", "37", "--keep", "2", "--log-every", "10")


@pytest.fixture(scope="module")
def uninterrupted(tiny_artifact, tmp_path_factory):
    """The last checkpoint and the log of a run of 40 epochs of 100 steps that nobody stopped."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    save_data(folder / "long.npz", 803)
    os.link(tiny_artifact, folder / "tiny.fixstep")
    process = start(*LONG, "--checkpoint-dir", "a", "--log", "m.csv", cwd=folder)
    assert process.wait() == 0, process.stderr.read()
    process.stderr.close()
    return (folder / "a/step-00004000.safetensors").read_bytes(), (folder / "m.csv").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_was_stopped_ends_as_if_it_had_not(folder, uninterrupted, number):
    save_data("long.npz", 803)
    for at in (-1, 0, 400, 1200):  # before the first checkpoint, right after it, and later
        process = start(*LONG, "--checkpoint-dir", "a", "--log", "m.csv", "--resume")
        if at < 0:
            time.sleep(0.02)
        else:
            wait_for(lambda at=at: newest_step("a") >= at, process)
        process.send_signal(number)
        code = process.wait()
        error = process.stderr.read()
        process.stderr.close()
        if number == signal.SIGKILL or at < 0:
            assert code != 0
        else:
            assert code == 128 + number
            assert f"fixstep: stopped by {number.name} after step {newest_step('a')}; saved a/step-" in error
            assert "Traceback" not in error
        assert newest_step("a") < 4000
    process = start(*LONG, "--checkpoint-dir", "a", "--log", "m.csv", "--resume")
    assert process.wait() == 0
    process.stderr.close()
    checkpoint, log = uninterrupted
    assert (folder / "a/step-00004000.safetensors").read_bytes() == checkpoint
    assert (folder / "m.csv").read_bytes() == log
    assert len([name for name in os.listdir("a") if name.startswith("step-")]) == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_at_once(folder, number, code):
    # Short sleeps: a signal that comes just before a sleep begins is seen only when that sleep ends.
    (folder / "slow.py").write_text(
        "import time\n"
        "def batches():\n"
        "    open('started', 'w').close()\n"
        "    for _ in range(6000):\n"
        "        time.sleep(0.01)\n"
        "    yield None\n"
    )
    process = start("--data", "slow:batches", "--checkpoint-dir", "a")
    wait_for(lambda: os.path.exists("started"), process)
    process.send_signal(number)
    assert process.stderr.readline() == "\n"
    assert f"{number.name}: stopping after this step; once more ends at once" in process.stderr.readline()
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait() == code
    assert time.monotonic() - began < 10
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


def test_run_needs_no_jax(folder):
    code = f"import sys; sys.modules['jax'] = sys.modules['iree.compiler'] = None; {START}"
    subprocess.run(
        [sys.executable, "-c", code, "run", "tiny.fixstep", "--data", "train.npz", "--validate", "test.npz"], check=True
    )


# --- inspect


def test_inspect(folder, capsys):
    assert main(["inspect", "tiny.fixstep"]) == 0
    out = capsys.readouterr().out
    for text in (
        "name      tiny\n",
        "state: 2 leaves, 52 B\n  steps  int32    []      4 B\n  w      float32  [4,3]  48 B\n",
        "batch: 2 leaves, 224 B\n",
        "  step(state × 2, accumulators × 2, batch × 2) -> state × 2, accumulators × 2, metrics\n",
        "      metrics: loss float32[]\n",
        "      outputs: y float32[8,3]\n",
        "fixpoint: no leaf moved\n",
        "targets: 1\n  cpu  ",
        "      requires architecture: ",
        "  program.mlir ",
    ):
        assert text in out


def test_inspect_json_is_the_manifest(folder, capsys):
    assert main(["inspect", "tiny.fixstep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == load("tiny.fixstep").artifact.manifest


@pytest.fixture(scope="module")
def wide_artifact(tmp_path_factory):
    """25 leaves of float16 that become float32, and a batch that is one array."""
    import jax
    import jax.numpy as jnp

    from fixstep.frontend import Program, compile

    def step(state, batch):
        return {name: value * jnp.float32(2) + batch.sum() for name, value in state.items()}, {}

    def init(key):
        return {f"leaf{i:02}": jnp.zeros(3, jnp.float16) for i in range(25)}

    path = tmp_path_factory.mktemp("wide") / "wide.fixstep"
    program = Program(name="wide", init=init, step=step, batch=jax.ShapeDtypeStruct((2, 3), "float32"))
    compile(program, path, targets=["cpu"])
    return path


def test_inspect_cuts_long_tables(wide_artifact, capsys):
    assert main(["inspect", str(wide_artifact)]) == 0
    short = capsys.readouterr().out
    assert "state: 25 leaves, 300 B\n" in short
    assert short.count("  and 5 more (--all shows them)\n") == 2
    assert "fixpoint: 25 leaves moved in 1 round\n  leaf00  float16[3]  →  float32[3]  round 1\n" in short
    assert "leaf24" not in short
    assert "  <the batch itself>  float32  [2,3]  24 B\n" in short
    assert main(["inspect", str(wide_artifact), "--all"]) == 0
    assert capsys.readouterr().out.count("leaf24") == 2


def test_a_batch_that_is_one_array_takes_the_only_array(wide_artifact, folder, capsys):
    np.savez("one.npz", values=np.ones((4, 3), np.float32))
    assert main(["run", str(wide_artifact), "--data", "one.npz", "--epochs", "1"]) == 0
    assert "done: 2 steps" in capsys.readouterr().out


# --- predict


def predict(*arguments, checkpoint="a", data="test.npz"):
    return main(["predict", "tiny.fixstep", "--checkpoint", checkpoint, "--data", data, "-o", "p.npz", *arguments])


def test_predict_gives_every_example_its_prediction(folder, capsys):
    run("--quiet", "--checkpoint-dir", "a", "--epochs", "1")
    assert predict() == 0
    assert capsys.readouterr().out.splitlines() == [
        "ignored, as predict does not take them: y",
        "wrote p.npz: y float32[19,3], with a/step-00000006.safetensors (6 steps)",
    ]
    weights = read_checkpoint("a/step-00000006.safetensors").leaves["w"]
    np.testing.assert_allclose(np.load("p.npz")["y"], np.load("test.npz")["x"] @ weights, rtol=1e-5, atol=1e-5)
    assert predict("-q", checkpoint="a/step-00000006.safetensors") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("checkpoint", "arrays", "output", "text"),
    [
        ("absent", {}, "p.npz", "absent: cannot read it: No such file or directory. Check the path."),
        ("empty", {}, "p.npz", "empty: a folder without checkpoints"),
        ("a", {"z": np.zeros((3, 4))}, "p.npz", " not fit the template:\n  x: expected float32[8,4], missing"),
        ("a", {"x": np.zeros((3, 4))}, "p.npz", "x: expected float32[8,4], got float64[8,4]"),
        ("a", {"x": np.zeros((3, 5), np.float32)}, "p.npz", "x: expected float32[8,4], got float32[8,5]"),
        ("a", {"x": np.float32(3)}, "p.npz", "x: expected float32[8,4], got float32[]"),
        ("a", {"x": np.zeros((3, 4), np.float32)}, "absent/p.npz", "absent/p.npz: no folder to write to: make absent"),
    ],
)  # fmt: skip
def test_predict_refuses(folder, capsys, checkpoint, arrays, output, text):
    (folder / "empty").mkdir()
    run("--quiet", "--checkpoint-dir", "a", "--epochs", "1")
    np.savez("d.npz", **(arrays or {"x": np.zeros((3, 4), np.float32)}))
    assert predict("-o", output, checkpoint=checkpoint, data="d.npz") == 2
    assert text in capsys.readouterr().err


def test_predict_needs_the_function(folder, wide_artifact, capsys):
    assert main(["predict", str(wide_artifact), "--checkpoint", "a", "--data", "test.npz", "-o", "p.npz"]) == 2
    assert "wide has no function 'predict'; it has init, step" in capsys.readouterr().err


# --- the dispatcher


def test_help_lists_every_command_without_jax():
    code = f"import sys; sys.modules['jax'] = None; {START}"
    out = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True).stdout
    for name in ("compile", "inspect", "run", "predict", "plot", "verify", "bench"):
        assert f"\n  {name} " in out


def test_compile_without_jax_says_what_to_install():
    code = f"import sys; sys.modules['jax'] = None; {START}"
    done = subprocess.run([sys.executable, "-c", code, "compile", "a:b"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "fixstep: error: 'fixstep compile' needs jax, which is not installed; "
        "install what compiles with: pip install 'fixstep[compile]'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, ""),
        (["rn"], 2, "fixstep: error: no command 'rn' (did you mean run?); the commands are compile, inspect, run"),
        (["--verbose"], 2, "fixstep: error: no option '--verbose'"),
        (["inspect", "absent.fixstep"], 2, "fixstep: error: absent.fixstep: "),
        (["inspect"], 2, "the following arguments are required: artifact"),
        (["--version"], 0, ""),
        (["run", "--help"], 0, ""),
    ],
)
def test_dispatch(capsys, monkeypatch, tmp_path, arguments, code, text):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert text in capsys.readouterr().err


COMMANDS = """
def configure(parser):
    "Does one thing."
    parser.add_argument("what")
    return run

def run(arguments):
    if arguments.what == "fault":
        {}["absent"]
    if arguments.what == "interrupt":
        raise KeyboardInterrupt
    if arguments.what == "file":
        open("absent/file")
    return 5
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    (tmp_path / "one_command.py").write_text(COMMANDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("FIXSTEP_DEBUG", raising=False)
    point = importlib.metadata.EntryPoint("one", "one_command:configure", _cli.GROUP)
    broken = importlib.metadata.EntryPoint("two", "absent_module:configure", _cli.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [broken, point])


def test_foreign_commands(command, capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "  one       Does one thing.\n" in out
    assert "  two       (cannot be loaded: No module named 'absent_module')\n" in out
    assert main(["one", "x"]) == 5


def test_a_fault_is_one_line_and_a_file(command, capsys, tmp_path, monkeypatch):
    assert main(["one", "fault"]) == 70
    error = capsys.readouterr().err
    assert error.startswith(
        "fixstep: error: unexpected KeyError: 'absent' (this is a fault of fixstep: please report it with "
    )
    assert error.count("\n") == 1
    path = error.rstrip(")\n").rpartition(" ")[2]
    assert "one_command.py" in pathlib.Path(path).read_text()
    monkeypatch.setenv("FIXSTEP_DEBUG", "1")
    assert main(["one", "fault"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("interrupt", 130, "fixstep: interrupted\n"),
        ("file", 2, "fixstep: error: absent/file: No such file or directory\n"),
    ],
)
def test_other_ends(command, capsys, what, code, text):
    assert main(["one", what]) == code
    assert capsys.readouterr().err == text


def test_a_closed_pipe_is_quiet(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", START, "inspect", "tiny.fixstep"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.wait() == 141
    assert process.stderr.read() == b""
    process.stderr.close()
