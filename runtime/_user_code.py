"""What a user names on the command line as `module:name`: data sources and handlers."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from fixstep.targets.errors import DataError


def import_callable(name: str, what: str, purpose: str) -> Callable[..., Any]:
    """The function or class that a `module:name` names; modules of the current directory are found too.

    Args:
        name: the module, a colon, the name in it.
        what: the words for it in messages, `data source`.
        purpose: what it is expected to be, `function that returns batches`.

    Raises:
        DataError: if there is no such module or name, if it fails on import, or if it cannot be called.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise DataError(f"expected a {what} as module:function, got {name!r}")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (module_name == exc.name or module_name.startswith(f"{exc.name}.")):
            raise DataError(
                f"no module {module_name!r} (of the {what} {name!r}) here or among the installed ones"
            ) from exc
        raise DataError(f"the module of the {what} {name!r} failed: {blame(exc)}") from exc
    except Exception as exc:
        raise DataError(f"the module of the {what} {name!r} failed: {blame(exc)}") from exc
    finally:
        sys.path.remove(os.getcwd())
    found = getattr(module, attribute, None)
    if found is None:
        raise DataError(f"the module {module_name!r} ({module.__file__}) has no {attribute!r}")
    if not callable(found):
        raise DataError(f"{name} is a {type(found).__name__}, expected a {purpose}")
    return found  # type: ignore[no-any-return]


def blame(exc: Exception) -> str:
    """What was raised, and the line that raised it."""
    frames = traceback.extract_tb(exc.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(exc).__name__}: {exc}{where}"
