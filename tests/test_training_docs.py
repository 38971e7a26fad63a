"""The page on the trainer: its code runs, and it names what there is."""

import re
from pathlib import Path

import numpy as np

from fixstep.frontend import metrics
from fixstep.frontend.training._precision import _NAMED

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "training.md").read_text()


def test_the_code_runs_and_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example, rate = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope: dict[str, object] = {}
    exec(compile(example, "training.md", "exec"), scope)
    assert scope["result"].averages["accuracy"] > 0.8
    path = "opt_state/hyperparams/learning_rate"
    before = scope["session"].state()[path]
    exec(compile(rate, "training.md", "exec"), scope)
    assert scope["session"].state()[path] == before / np.float32(10)


def test_every_metric_and_policy_is_named():
    for name in [*metrics.__all__, *_NAMED]:
        assert re.search(rf"\b{name}\b", PAGE), name
