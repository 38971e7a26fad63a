"""The documents name what is there."""

import argparse
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fixstep.runtime
from fixstep.runtime import ArrayData, Checkpoints, Loop, MetricsLog, load
from fixstep.runtime._run_command import run_command

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document):
    text = document.read_text()
    for name in re.findall(r"`((?:frontend|runtime|targets|docs|rewrites|scripts)/[\w/.]+\.(?:py|md))`", text):
        base = ROOT / "frontend" if name.startswith("rewrites/") else ROOT
        assert (base / name).is_file(), name
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert (ROOT / "tests" / name).is_file(), name


def test_the_code_of_the_loops_page_runs(tiny_artifact, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").mkdir()
    x = np.random.default_rng(0).standard_normal((160, 4)).astype(np.float32)
    data = ArrayData({"x": x, "y": x[:, :3].copy()}, 8)
    scope = {"session": load(tiny_artifact), "data": data, "validation": data}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "loop.md").read_text(), re.DOTALL):
        exec(compile(code, "loop.md", "exec"), scope)
    assert "epoch 5, step 100: loss " in capsys.readouterr().out
    seen = scope["Seen"]()
    Loop(load(tiny_artifact), [seen, MetricsLog("m.csv"), Checkpoints("b")]).run(data, epochs=1)
    assert (tmp_path / "m.csv").read_text().splitlines()[0].endswith(",examples")


def test_the_options_of_the_loops_page_are_options():
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "loop.md").read_text(), re.DOTALL)
    parser = argparse.ArgumentParser()
    run_command(parser)
    assert {f"--{key}" for key in tomllib.loads(text)} <= set(parser._option_string_actions)


def test_every_name_of_the_runtime_is_on_a_page():
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    events = {"CONTINUE", "HALT_EPOCH", "HALT_LOOP", "On", "every", "after", "before", "once", "always", "first"}
    handlers = {name for name in fixstep.runtime.__all__ if hasattr(getattr(fixstep.runtime, name), "on_started")}
    handlers |= {"Progress", "LogLines", "Throughput", "load_leaves", "ArrayData", "DatasetData"} | events
    assert [name for name in sorted(handlers) if name != "Handler" and name not in pages] == []


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([\w/.]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
