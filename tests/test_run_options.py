"""What `fixstep run` takes beside data: handlers by flags, a TOML file, a dry run; and `fixstep plot`."""

import csv
import json
import os
import re
import sys

import numpy as np
import pytest

from fixstep.runtime import read_checkpoint
from fixstep.runtime._cli import main

RATE = "opt/hyperparams/learning_rate"


@pytest.fixture(scope="module")
def rated_artifact(tmp_path_factory):
    """A linear regression whose learning rate is a leaf of its state."""
    import jax
    import jax.numpy as jnp
    import optax

    from fixstep.frontend import Program, compile

    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.05)

    def loss(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    def step(state, batch):
        value, grad = jax.value_and_grad(loss)(state["w"], batch)
        updates, opt = optimizer.update(grad, state["opt"])
        return {"w": state["w"] + updates, "opt": opt}, {"loss": value}

    program = Program(
        name="rated",
        init=lambda key: {"w": jnp.zeros((4, 3)), "opt": optimizer.init(jnp.zeros((4, 3)))},
        step=step,
        evaluate=lambda state, batch: {"loss": loss(state["w"], batch)},
        batch={"x": jax.ShapeDtypeStruct((8, 4), "float32"), "y": jax.ShapeDtypeStruct((8, 3), "float32")},
    )
    path = tmp_path_factory.mktemp("rated") / "rated.fixstep"
    compile(program, path, targets=["cpu"])
    return path


@pytest.fixture
def folder(tmp_path, rated_artifact, monkeypatch):
    """The current directory, with an artifact and data."""
    monkeypatch.chdir(tmp_path)
    os.link(rated_artifact, "rated.fixstep")
    rng = np.random.default_rng(0)
    for name, examples in (("train", 48), ("test", 16)):
        x = rng.standard_normal((examples, 4)).astype(np.float32)
        np.savez(f"{name}.npz", x=x, y=(x @ np.ones((4, 3))).astype(np.float32))
    return tmp_path


def run(*arguments):
    return main(["run", "rated.fixstep", "--data", "train.npz", *arguments])


def rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


EVERYTHING = [
    *("--validate", "test.npz", "--validate-every", "4", "--epochs", "6", "--prefetch", "2", "--iterations", "5"),
    *(
        "--checkpoint-dir",
        "a",
        "--checkpoint-every",
        "2",
        "--keep",
        "2",
        "--best",
        "validation/loss",
        "--keep-best",
        "2",
    ),
    *("--log-every", "3", "--tensorboard", "tb", "--print-every", "10", "--log-state", RATE),
    *("--early-stop", "validation/loss", "--early-stop-patience", "50", "--early-stop-min-delta", "0.001"),
    *("--reduce", RATE, "--reduce-on", "loss", "--reduce-factor", "0.5", "--reduce-patience", "1"),
    *("--reduce-min-delta", "0.5", "--reduce-cooldown", "1", "--reduce-minimum", "0.02"),
]


def test_everything_at_once_and_resumed(folder, capsys):
    assert run(*EVERYTHING) == 0
    out = capsys.readouterr().out
    assert re.search(r"^epoch 2/6  step 10  loss [\d.]+  learning_rate 0.05$", out, re.MULTILINE)
    assert re.search(r"^epoch 3/6  step 15  loss .*  learning_rate 0\.\d+  validation: loss .* steps/s\)$", out, re.M)
    assert "done: 30 steps, 6 whole epochs; checkpoint a/step-00000030.safetensors" in out
    log = rows(folder / "a" / "metrics.csv")
    assert [row["step"] for row in log if row["event"] == "epoch"] == ["5", "10", "15", "20", "25", "30"]
    assert [row["step"] for row in log if row["event"] == "validation"] == [str(n) for n in range(4, 30, 4)]
    rates = [float(row["learning_rate"]) for row in log if row["event"] == "epoch"]
    assert rates[0] == pytest.approx(0.05)
    assert min(rates) == pytest.approx(0.02)
    assert len(os.listdir("a/best")) == 2
    os.rename("a", "whole")
    for limit in ("7", "15", "22"):
        assert run(*EVERYTHING, "--resume", "--quiet", "--max-steps", limit) == 0
    assert run(*EVERYTHING, "--resume", "--quiet") == 0
    names = sorted(str(path.relative_to(folder / "whole")) for path in (folder / "whole").rglob("*.*"))
    assert names == sorted(str(path.relative_to(folder / "a")) for path in (folder / "a").rglob("*.*"))
    for name in names:
        assert (folder / "a" / name).read_bytes() == (folder / "whole" / name).read_bytes(), name


def test_early_stop_is_told(folder, capsys):
    assert run("--early-stop", "max:loss", "--early-stop-patience", "2", "--epochs", "9") == 0
    assert "done: 18 steps, 3 whole epochs; halted by EarlyStop, with loss " in capsys.readouterr().out


def test_halting_on_what_is_not_finite(folder, capsys):
    arrays = dict(np.load("train.npz"))
    arrays["x"][10] = np.inf
    np.savez("train.npz", **arrays)
    assert run("--no-shuffle", "--on-nonfinite", "halt") == 0
    captured = capsys.readouterr()
    assert "done: 2 steps, 0 whole epochs; halted by HaltOnNonFinite" in captured.out
    assert "fixstep: halts after step 2: loss is inf" in captured.err


def test_validation_of_every_second_epoch(folder):
    assert run("--validate", "test.npz", "--validate-epochs", "2", "--epochs", "4", "--log", "m.jsonl", "-q") == 0
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    assert ["validation/loss" in line for line in lines] == [False, True, False, True]


def test_times_are_logged(folder):
    assert run("--log-times", "--log", "m.csv", "-q") == 0
    assert all(float(row["steps_per_second"]) > 0 < float(row["seconds"]) for row in rows(folder / "m.csv"))


def test_a_handler_of_ones_own(folder, capsys):
    (folder / "mine.py").write_text(
        "from fixstep.runtime import HALT_LOOP, On, once\n"
        "class Count:\n"
        "    count = 0\n"
        "    def __init__(self):\n"
        "        self.logged_values = {'count': lambda state: self.count}\n"
        "    def on_iteration_completed(self, state):\n"
        "        self.count += 1\n"
        "def enough(state):\n"
        "    return HALT_LOOP\n"
        "def make():\n"
        "    return On('epoch_completed', enough, when=once(2))\n"
        "class Wrong:\n"
        "    def on_epoch(self, state): pass\n"
    )
    assert run("--handler", "mine:Count", "--handler", "mine:make", "--log", "m.csv", "--epochs", "9") == 0
    assert "done: 12 steps, 2 whole epochs; halted by enough, with loss " in capsys.readouterr().out
    assert [row["count"] for row in rows(folder / "m.csv")] == ["6", "12"]
    for name, text in {
        "mine": "expected a handler as module:function, got 'mine'",
        "mine:absent": "has no 'absent'",
        "nowhere:x": "no module 'nowhere' (of the handler 'nowhere:x') here or among the installed ones",
        "mine:Wrong": "handler Wrong has on_epoch, but the events are on_started",
    }.items():
        assert run("--handler", name) == 2
        assert text in capsys.readouterr().err


def test_nothing_to_train(folder, capsys):
    assert run("--epochs", "0") == 0
    assert "done: 0 steps, 0 whole epochs\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--best", "loss"], "--best needs --checkpoint-dir, the folder of the checkpoints"),
        (["--validate-every", "3"], "--validate-every needs --validate"),
        (["--early-stop-patience", "3"], "--early-stop-patience needs --early-stop"),
        (["--reduce", RATE], "--reduce needs --reduce-on"),
        (["--in-part"], "--in-part needs --start-from"),
        (["--early-stop", "accuracy"], "no metric 'accuracy' to follow; there are loss (there is no validation data)"),
        (["--reduce", "lr", "--reduce-on", "loss"], "the state has no leaf 'lr'; `fixstep inspect` lists its leaves."),
        (["--reduce", RATE, "--reduce-on", "loss", "--reduce-factor", "2"], "factor: expected a number between 0 and"),
        (["--log-state", "w"], "the state's leaf 'w': expected one floating-point number, got float32[4,3]"),
        (["--config", "absent.toml"], "absent.toml: cannot be read: No such file or directory"),
    ],
)
def test_refused(folder, capsys, arguments, text):
    assert run(*arguments) == 2
    assert text in capsys.readouterr().err


# --- batches of any size


@pytest.fixture(scope="module")
def any_size(tmp_path_factory):
    import jax
    import jax.numpy as jnp

    from fixstep.frontend import Program, compile

    def step(state, batch):
        return {"w": state["w"] + batch["x"].sum()}, {"loss": batch["x"].mean()}

    (b,) = jax.export.symbolic_shape("b", constraints=["b <= 16", "b >= 4"])
    program = Program(
        name="any", init={"w": jnp.zeros(())}, step=step, batch={"x": jax.ShapeDtypeStruct((b,), "float32")}
    )
    path = tmp_path_factory.mktemp("any") / "any.fixstep"
    compile(program, path, targets=["cpu"])
    return path


@pytest.mark.parametrize(
    ("options", "examples", "told"),
    [
        ([], 21, "21 examples, 2 batches of 16 an epoch, in order"),
        (["--batch-size", "8"], 20, "20 examples, 3 batches of 8 an epoch, in order"),
        (["--batch-size", "8"], 19, "19 examples, 2 batches of 8 an epoch, in order\ntraining: 3 examples do not fill"),
    ],
)
def test_the_last_short_batch_trains_where_the_artifact_takes_it(folder, any_size, capsys, options, examples, told):
    x = np.arange(examples, dtype=np.float32)
    np.savez("x.npz", x=x)
    command = ["run", str(any_size), "--data", "x.npz", "--no-shuffle", "--epochs", "1", "--checkpoint-dir", "a"]
    assert main([*command, *options]) == 0
    assert told in capsys.readouterr().out
    (checkpoint,) = (folder / "a").glob("step-*")
    left_out = 3 if examples == 19 else 0
    assert read_checkpoint(checkpoint).leaves["w"] == x[: examples - left_out].sum()


def test_a_size_that_the_artifact_does_not_take(folder, any_size, capsys):
    np.savez("x.npz", x=np.ones(20, np.float32))
    assert main(["run", str(any_size), "--data", "x.npz", "--batch-size", "3"]) == 2
    assert "--batch-size 3: the artifact takes 4 to 16, multiples of 1" in capsys.readouterr().err


# --- a first state from a checkpoint


def test_start_from(folder, tiny_artifact, capsys):
    assert run("--checkpoint-dir", "a", "-q") == 0
    checkpoint = "a/step-00000018.safetensors"
    assert run("--start-from", checkpoint, "--epochs", "0") == 0
    assert f"{checkpoint}: taken as the first state" in capsys.readouterr().out
    command = ["run", str(tiny_artifact), "--data", "train.npz", "--start-from", checkpoint, "--epochs", "1"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "steps: expected int32[], missing" in error
    assert "Take over the leaves that fit with strict=False (--in-part)." in error
    assert main([*command, "--in-part", "--checkpoint-dir", "b"]) == 0
    out = capsys.readouterr().out
    assert "1 leaves kept, 1 missing, 2 unexpected\n  kept: w\n  missing: steps\n  unexpected: opt/count\n" in out


# --- a file of options

TOML = """
artifact = "rated.fixstep"
data = "train.npz"
epochs = 2
checkpoint-dir = "runs/a"
log-state = ["opt/hyperparams/learning_rate"]
no-shuffle = true
resume = false
early-stop = "max:loss"
early-stop-min-delta = 0.5
"""


def test_a_file_of_options(folder, capsys):
    (folder / "run.toml").write_text(TOML)
    assert main(["run", "--config", "run.toml"]) == 0
    out = capsys.readouterr().out
    assert "48 examples, 6 batches of 8 an epoch, in order" in out
    assert "done: 12 steps, 2 whole epochs; checkpoint runs/a/step-00000012.safetensors" in out
    assert [row["learning_rate"] for row in rows(folder / "runs/a/metrics.csv")] == 2 * [str(float(np.float32(0.05)))]
    assert main(["run", "--epochs", "1", "--config=run.toml", "--checkpoint-dir", "runs/b", "-q"]) == 0
    assert os.listdir("runs/b") != []
    assert read_checkpoint("runs/b/step-00000006.safetensors").steps == 6  # the command line goes before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3\nkeep-bset = 2\n", "run.toml: not the options of fixstep run:\n  epoch: no such option (did you "
         "mean epochs?)\n  keep-bset: no such option (did you mean keep-best?)\n`fixstep run --help` lists them."),
        ("keep_best = 2\n", "  keep_best: no such option (did you mean keep-best?)"),
        ("resume = 1\n", "  resume: expected true or false, got 1"),
        ("epochs = true\n", "  epochs: expected a string or a number, got True"),
        ("epochs = [1, 2]\n", "  epochs: expected a string or a number, got [1, 2]"),
        ("log-state = {a = 1}\n", "  log-state: expected a string or a number or a list of them, got {'a': 1}"),
        ("config = 'b.toml'\n", "  config: no such option"),
        ("epochs = \n", "run.toml: not TOML: Invalid value (at line 1, column 10)"),
        ("epochs = -2\n", "argument --epochs: expected an integer from 0, got '-2'"),
    ],
)  # fmt: skip
def test_a_file_that_is_refused(folder, capsys, text, message):
    (folder / "run.toml").write_text(text)
    assert run("--config", "run.toml") == 2
    assert message in capsys.readouterr().err


def test_other_commands_have_no_config(folder, capsys):
    assert main(["inspect", "rated.fixstep", "--config", "run.toml"]) == 2
    assert "unrecognized arguments: --config run.toml" in capsys.readouterr().err


# --- a dry run


def everything_in(folder):
    return sorted(str(path) for path in folder.rglob("*"))


def test_a_dry_run_does_one_of_everything_and_keeps_nothing(folder, capsys):
    before = everything_in(folder)
    assert run(*EVERYTHING, "--dry-run") == 0
    out = capsys.readouterr().out
    assert re.fullmatch(
        r"dry run: one step \(loss [\d.]+\), one batch of validation \(loss [\d.]+\), "
        r"a checkpoint of [\d,]+ bytes written and read back; nothing was kept\n",
        out,
    )
    assert everything_in(folder) == before


def test_a_dry_run_of_a_resume_begins_at_the_checkpoint(folder, capsys):
    assert run("--checkpoint-dir", "a", "-q") == 0
    before = everything_in(folder)
    expected = float(rows(folder / "a/metrics.csv")[-1]["loss"])
    assert run("--checkpoint-dir", "a", "--resume", "--dry-run") == 0
    loss = float(re.search(r"loss ([\d.e-]+)", capsys.readouterr().out)[1])
    assert loss < 3 * expected
    assert everything_in(folder) == before


def test_a_dry_run_finds_what_is_wrong(folder, capsys):
    assert run("--dry-run", "--log-state", "w") == 2
    assert "expected one floating-point number" in capsys.readouterr().err
    (folder / "bad.py").write_text("def batches():\n    yield {'x': 1}\n")
    assert run("--dry-run", "--validate", "bad:batches") == 2
    assert "the batch does not fit the template" in capsys.readouterr().err


# --- plot


@pytest.fixture
def runs(folder):
    assert (
        run("--checkpoint-dir", "runs/a", "--validate", "test.npz", "--log-every", "2", "--log-state", RATE, "-q") == 0
    )
    assert run("--log", "b.jsonl", "--seed", "2", "-q") == 0
    return folder


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(runs, capsys, suffix):
    first, second = f"one.{suffix}", f"two.{suffix}"
    for name in (first, second):
        assert main(["plot", "runs/a", "b.jsonl", "-o", name]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"wrote {first}: loss, learning_rate of a, b.jsonl"
    data = (runs / first).read_bytes()
    assert data[:4] == {"png": b"\x89PNG", "svg": b"<?xm"}[suffix]
    assert data == (runs / second).read_bytes()  # the same runs, the same file
    if suffix == "svg":
        text = data.decode()
        for words in ("loss", "learning_rate", "step", "a", "b.jsonl", "each step", "epoch average"):
            assert f"<!-- {words} -->" in text
        assert "<!-- validation -->" in text


def test_plot_of_chosen_metrics(runs, capsys):
    assert main(["plot", "runs/a", "-o", "c.svg", "--metric", "loss", "--log-scale", "loss"]) == 0
    text = (runs / "c.svg").read_text()
    assert "<!-- loss -->" in text
    assert "<!-- learning_rate -->" not in text


def test_runs_of_one_name_are_told_apart(runs):
    os.makedirs("others/a")
    os.rename("b.jsonl", "others/a/metrics.jsonl")
    assert main(["plot", "runs/a", "others/a", "-o", "c.svg"]) == 0
    text = (runs / "c.svg").read_text()
    assert "<!-- runs/a -->" in text
    assert "<!-- others/a -->" in text


def test_what_is_not_finite_and_a_row_that_was_cut_off(runs):
    from fixstep.runtime._runs import read_curves

    with open("b.jsonl", "a") as file:
        file.write('{"event": "epoch", "epoch": 4, "step": 24, "loss": null}\n{"event": "ep')
    (curve,) = read_curves(runs / "b.jsonl")
    assert curve.steps == (6, 12, 18, 24)
    assert np.isnan(curve.values[-1])
    with open("runs/a/metrics.csv", "a") as file:
        file.write("epoch,4,24,inf,nan,0.1\nepoch,5,")
    last = {(c.metric, c.kind): (c.steps[-1], c.values[-1]) for c in read_curves(runs / "runs/a/metrics.csv")}
    assert last["learning_rate", "epoch"] == (24, 0.1)
    assert np.isnan([last["loss", "epoch"][1], last["loss", "validation"][1]]).all()
    assert main(["plot", "runs/a", "b.jsonl", "-o", "c.png", "-q"]) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["runs/a", "-o", "c.gif"], "c.gif: expected a file that ends in .png or .svg"),
        (["runs/c", "-o", "c.png"], "runs/c: no such file or folder"),
        (
            ["runs", "-o", "c.png"],
            "runs: expected one metrics file (.csv or .jsonl), as `fixstep run` writes it, got n",
        ),
        (["train.npz", "-o", "c.png"], "train.npz: cannot be read: "),
        (["run.toml", "-o", "c.png"], "run.toml: not a metrics file: expected the columns event, epoch, step first"),
        (["bad.jsonl", "-o", "c.png"], "bad.jsonl, line 1: not a row of a metrics file"),
        (["runs/a", "-o", "c.png", "--metric", "f1"], "no metric 'f1' in these runs; there are loss, learning_rate"),
        (["runs/a", "-o", "absent/c.png"], "absent/c.png: cannot write it: No such file or directory. Make the folder"),
    ],
)
def test_plot_refuses(runs, capsys, arguments, text):
    (runs / "run.toml").write_text("a = 1\n")
    (runs / "bad.jsonl").write_text("[]\n")
    assert main(["plot", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


def test_plot_without_matplotlib_is_one_clear_error(runs, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", "runs/a", "-o", "c.png"]) == 2
    assert "drawing needs matplotlib" in capsys.readouterr().err
    assert not os.path.exists("c.png")


def test_a_library_that_is_absent_is_an_error_of_ours(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert run("--tensorboard", "tb") == 2
    assert "pip install 'fixstep[tensorboard]'" in capsys.readouterr().err
