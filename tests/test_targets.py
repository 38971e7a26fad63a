"""Targets: a new one is one new file, and every one offers the same."""

import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_batch

import fixstep.targets
from fixstep import targets
from fixstep.frontend import Program, compile
from fixstep.runtime import Artifact, load
from fixstep.targets import cpu
from fixstep.targets._base import Target
from fixstep.targets.errors import DeviceError

MADE_UP = '''
"""A made-up target: the CPU under another name, and preferred to it."""
import dataclasses
from fixstep.targets import cpu

@dataclasses.dataclass(frozen=True)
class MadeUp(cpu.Cpu):
    def preference(self):
        return 1000

def parse(option):
    return MadeUp("madeup" if option is None else f"madeup:{option}", "generic", None)
'''


def test_a_new_target_is_one_new_file(tiny_program, tmp_path, monkeypatch):
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "madeup.py").write_text(MADE_UP)
    monkeypatch.setattr(fixstep.targets, "__path__", [*fixstep.targets.__path__, str(folder)])
    try:
        assert "madeup" in targets.families()
        path = tmp_path / "tiny.fixstep"
        compiled = compile(tiny_program, path, targets=["cpu", "madeup"])
        assert {result.target for result in compiled.verifications} == {"cpu", "madeup"}
        session = load(path)
        assert session.choice.target == "madeup"
        session.step(tiny_batch())
    finally:
        sys.modules.pop("fixstep.targets.madeup", None)
    assert load(path, target="cpu").choice.target == "cpu"


@pytest.mark.parametrize("family", targets.families())
def test_every_target_offers_what_the_protocol_says(family):
    target = targets.parse(family)
    assert target.text == family
    assert target.memory in ("host", "shared", "separate")
    for name, member in inspect.getmembers(Target, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(type(target), name)) == inspect.signature(member), name
    text = "module {\n}"
    assert target.adapt(text).count("\n") == text.count("\n")
    assert target.unsupported("float32") is None
    assert isinstance(target.preference(), int)


def test_what_was_passed_over_is_said(tiny_program, tmp_path):
    compile(tiny_program, tmp_path / "a.fixstep", targets=["cpu", "cuda", "vulkan"], verify=False)
    session = load(tmp_path / "a.fixstep")
    absent = [t for t in ("cuda", "vulkan") if targets.parse(t).unavailable({}) and targets.parse(t).preference() > 0]
    assert [line.partition(":")[0] for line in session.choice.passed_over] == absent


def test_no_driver_is_opened_for_a_target_that_the_artifact_lacks(tiny_artifact):
    code = (
        "import iree.runtime as rt\n"
        "asked = []; get = rt.get_driver; rt.get_driver = lambda name: asked.append(name) or get(name)\n"
        "from fixstep.runtime import load\n"
        f"load({str(tiny_artifact)!r}); print([n for n in asked if not n.startswith('local')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_manifest_says_what_each_target_needs(tiny_program, tmp_path):
    compile(tiny_program, tmp_path / "a.fixstep", targets=["cuda:sm_86", "vulkan"], verify=False)
    needs = {e["text"]: e["requires"] for e in Artifact.open(tmp_path / "a.fixstep").manifest["targets"]}
    assert needs["cuda:sm_86"] == {"compute_capability": 86}
    assert "f32" in needs["vulkan"]["types"]


@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "bare"])
def test_a_loop_that_exchanges_carries_loses_none(guarded, tmp_path, monkeypatch):
    """`bare` fails when IREE is mended: then the edit can go."""
    if not guarded:
        monkeypatch.setattr(cpu.Cpu, "code_edits", lambda self, module: ())

    def step(state, batch):
        carries = tuple(batch[name] * 1.5 for name in "abc")
        turned = jax.lax.fori_loop(0, batch["n"], lambda i, t: (t[1] * 0.5 + i, t[2], t[0]), carries)
        return {"a": state["a"]}, {str(i): value for i, value in enumerate(turned)}

    a = np.arange(1, 5, dtype=np.float32)
    batch = {"n": np.int32(5), "a": a, "b": a + 10, "c": a + 20}
    compile(Program(init={"a": a}, step=step, batch=batch), tmp_path / "a.fixstep", targets=["cpu"], verify=False)
    session = load(tmp_path / "a.fixstep", target="cpu")
    if not guarded:
        with pytest.raises(DeviceError, match="indirect buffer reference slot 0 is out range"):
            session.step(batch)
        return
    metrics = session.step(batch)
    for name, expected in step({"a": a}, batch)[1].items():
        np.testing.assert_allclose(metrics[name].numpy(), expected)


def test_worker_threads_give_the_bits_of_one_thread(tmp_path):
    """Loops within loops over arrays that are large enough for threads."""

    def step(state, batch):
        def turn(w, x):
            w = jax.lax.fori_loop(0, 3, lambda i, w: w * 0.5 + jnp.outer(x, x) * i, w)
            return w, w.sum()

        w, sums = jax.lax.scan(turn, state["w"], batch)
        w = jax.lax.while_loop(lambda w: jnp.abs(w).max() > 1, lambda w: w * 0.75, w)
        return {"w": w}, {"sum": sums.sum()}

    batch = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    program = Program(init={"w": np.zeros((512, 512), np.float32)}, step=step, batch=batch)
    compile(program, tmp_path / "a.fixstep", targets=["cpu:host"], verify=False)
    threaded, single = (load(tmp_path / "a.fixstep", device=device) for device in ("local-task", "local-sync"))
    if cpu._cores() > 1:
        assert load(tmp_path / "a.fixstep").choice.device == threaded.choice.device
    for _ in range(20):
        assert float(threaded.step(batch)["sum"]) == float(single.step(batch)["sum"])
    assert threaded.state()["w"].tobytes() == single.state()["w"].tobytes()
