"""The README's code runs, and its lists are complete."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs_and_learns_and_what_follows_it_goes_on_from_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, *others = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(first.splitlines()) <= 25
    scope: dict[str, object] = {}
    exec(compile(first, "README.md", "exec"), scope)
    assert scope["result"].averages["loss"] < 1e-3
    assert scope["session"].state()["seen"] == 8 * 160
    for code in others:
        exec(compile(code, "README.md", "exec"), scope)


def test_every_command_is_shown():
    from fixstep.runtime._cli import _SUMMARIES

    for command in _SUMMARIES:
        assert f"    fixstep {command} " in README


def test_the_folders_are_there():
    for folder in re.findall(r"^\| `(\w+/)` \|", README, re.MULTILINE):
        assert (ROOT / folder).is_dir()


def test_the_two_commands_are_there():
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)
    assert commands == ["pip install -e '.[examples]' && examples/digits.sh", "pip install -e '.[test]' && pytest"]
