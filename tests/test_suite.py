"""Every case on every target: right, refused as it has to be, or skipped because this machine has no such device."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _suite import ABSENT, NEVER, TARGETS, TODAY, Outcome, listed, outcomes, surprise
from _suite_cases import CASES

from fixstep import targets
from fixstep.frontend import Program, compile
from fixstep.runtime import load


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_on_a_target(name, target):
    assert not (listed(NEVER, target, name) and listed(TODAY, target, name)), "an entry of both lists"
    outcome = outcomes(name)[target]
    if target in ABSENT:
        pytest.skip(ABSENT[target])
    problem = surprise(name, target, outcome)
    assert problem is None, problem
    if outcome.status == "absent":
        pytest.skip(outcome.why)


@pytest.mark.parametrize("name", ["adam", "dropout", "every_second_step", "type_bfloat16"])
def test_a_run_moves_from_target_to_target(name, tmp_path):
    """Saved on one, restored on another, and on: every path through the targets ends where the others do."""
    present = [t for t in TARGETS if targets.parse(t).unavailable({}) is None and name not in TODAY.get(t, {})]
    if len(present) < 2:
        pytest.skip(f"this machine has one target only: {present}")
    case = CASES[name]
    init, step, batches = case.build()
    path = tmp_path / "a.fixstep"
    compile(Program(init=init, step=step, batch=batches[0], name=name), path, targets=present, verify=False)
    ends = []
    for first, second in [(a, b) for a in present for b in present]:
        session = load(path, target=first)
        for batch in batches[:2]:
            session.step(batch)
        session.save(tmp_path / "c.safetensors", position={"at": 2})
        other = load(path, target=second)
        assert other.restore(tmp_path / "c.safetensors") == {"at": 2}
        assert {p: a.tobytes() for p, a in other.state().items()} == {
            p: a.tobytes() for p, a in session.state().items()
        }
        for batch in batches[:2]:
            other.step(batch)
        assert other.steps == 4
        ends.append(other.state())
    for end in ends[1:]:
        for leaf, value in end.items():
            # Sums in another order, over four steps: a few units in the last place of the coarsest type, bfloat16.
            coarse = 2e-2 if value.dtype.name == "bfloat16" else 1e-4
            np.testing.assert_allclose(value.astype("f8"), ends[0][leaf].astype("f8"), coarse, coarse, err_msg=leaf)


def test_the_lists_name_cases_that_exist():
    for lists in (NEVER, TODAY):
        for target, entries in lists.items():
            assert target in targets.families()
            for name, reason in entries.items():
                assert reason
                assert name in CASES or name.startswith("zoo:"), name


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("adam", "passes", None),
        ("adam", "absent", None),
        ("adam", "fails", "why"),
        ("adam", "refused", "why"),
        ("host_callback", "refused", None),
        ("host_callback", "passes", "listed as impossible"),
        ("a_case", "passes", "listed as failing"),
        ("a_case", "fails", None),
    ],
)
def test_what_the_lists_do_not_say_is_told(name, status, said, monkeypatch):
    monkeypatch.setitem(TODAY, "cpu", {"a_case": "a reason"})
    found = surprise(name, "cpu:host", Outcome(status, "why"))
    assert (found is None) if said is None else said in found


def test_the_script_for_a_gpu_says_where_there_is_none():
    reason = targets.parse("cuda").unavailable({})
    if reason is None:
        pytest.skip("this machine has a GPU")
    script = Path(__file__).parent.parent / "scripts" / "cuda"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, f"nothing to run cuda on: {reason}\n", "")
