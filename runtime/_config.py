"""Options from a TOML file: a key is an option's long name, and the command line goes before it."""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fixstep.targets.errors import DataError

OPTION = "--config"


class CommandParser(argparse.ArgumentParser):
    """A parser of one command's arguments. If the command has `--config FILE`, the options in that file count too."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, and those of the file that they name.

        Raises:
            DataError: if the file cannot be read, or holds what is no option.
        """
        return super().parse_args(self._with_file(list(args or ())), namespace)

    def _with_file(self, arguments: list[str]) -> list[str]:
        if OPTION not in self._option_string_actions:
            return arguments
        before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        before.add_argument(OPTION)
        path = before.parse_known_args(arguments)[0].config
        # What is said twice is said last on the command line.
        return arguments if path is None else [*self._from_file(Path(path)), *arguments]

    def _from_file(self, path: Path) -> list[str]:
        options = {
            name.removeprefix("--"): action
            for action in self._actions
            for name in action.option_strings or [action.dest]
            if name.startswith("--") or not action.option_strings
        }
        for name in ("help", OPTION.removeprefix("--")):
            options.pop(name, None)
        arguments: list[str] = []
        problems: list[str] = []
        for key, value in _read(path).items():
            if key not in options:
                near = difflib.get_close_matches(key.replace("_", "-"), options, n=1)
                problems.append(f"  {key}: no such option{f' (did you mean {near[0]}?)' if near else ''}")
                continue
            action = options[key]
            texts = _texts(action, value)
            if isinstance(texts, str):
                problems.append(f"  {key}: expected {texts}, got {value!r:.60}")
            elif action.option_strings:
                arguments += [f"--{key}{text}" for text in texts]
            else:  # a positional argument, which the command line need no longer have
                action.nargs, action.required = "?", False
                action.default = self._get_value(action, texts[0].removeprefix("="))
        if problems:
            lines = [f"{path}: not the options of {self.prog}:", *problems, f"`{self.prog} --help` lists them."]
            raise DataError("\n".join(lines))
        return arguments


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as exc:
        raise DataError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise DataError(f"{path}: not TOML: {exc}") from exc


def _texts(action: argparse.Action, value: Any) -> Sequence[str] | str:
    """What follows the option's name on a command line, once for each time it is given; or what was expected."""
    if action.nargs == 0:
        return "true or false" if not isinstance(value, bool) else [""] if value else []
    values = value if isinstance(value, list) and isinstance(action, argparse._AppendAction) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in values):
        many = " or a list of them" if isinstance(action, argparse._AppendAction) else ""
        return f"a string or a number{many}"
    return [f"={item}" for item in values]
