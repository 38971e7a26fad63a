"""Finds the target files in this folder and reads target texts such as `cpu:host`."""

from __future__ import annotations

import importlib
import pkgutil

import fixstep.targets
from fixstep.targets._base import Target
from fixstep.targets.errors import TargetError


def families() -> tuple[str, ...]:
    """The names of the target families, each a file of this folder; none of them is imported."""
    names = (info.name for info in pkgutil.iter_modules(fixstep.targets.__path__))
    return tuple(sorted(name for name in names if not name.startswith("_") and name != "errors"))


def parse(text: str) -> Target:
    """The target that a text names.

    Args:
        text: `family` or `family:option`; what the option may be is said in the family's file.

    Raises:
        TargetError: if there is no such family, or it has no such option.
    """
    name, colon, option = text.partition(":")
    known = families()
    if name not in known:
        raise TargetError(f"unknown target {text!r}: expected one of {', '.join(known)}, with or without an option")
    if colon and not option:
        raise TargetError(f"target {text!r}: nothing after the colon; write {name!r} or give an option")
    target: Target = importlib.import_module(f"fixstep.targets.{name}").parse(option or None)
    return target
