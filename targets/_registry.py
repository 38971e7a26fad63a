"""Finds the target files in this folder and reads target texts such as `cpu:host`."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import fixstep.targets
from fixstep.targets._base import Target
from fixstep.targets.errors import TargetError


def families() -> dict[str, ModuleType]:
    """The target modules by family name."""
    modules = [
        importlib.import_module(f"fixstep.targets.{info.name}")
        for info in pkgutil.iter_modules(fixstep.targets.__path__)
        if not info.name.startswith("_") and info.name != "errors"
    ]
    return {
        module.__name__.rpartition(".")[2]: module for module in sorted(modules, key=lambda module: module.__name__)
    }


def parse(text: str) -> Target:
    """The target that a text names.

    Args:
        text: `family` or `family:option`; what the option may be is said in the family's file.

    Raises:
        TargetError: if there is no such family, or it has no such option.
    """
    name, colon, option = text.partition(":")
    modules = families()
    if name not in modules:
        raise TargetError(f"unknown target {text!r}: expected one of {', '.join(modules)}, with or without an option")
    if colon and not option:
        raise TargetError(f"target {text!r}: nothing after the colon; write {name!r} or give an option")
    target: Target = modules[name].parse(option or None)
    return target
