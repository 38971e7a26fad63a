"""Runs iree-compile: a module's text and a target in, a VMFB or one short message out."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iree.compiler.tools import binaries

from fixstep.frontend import _cache
from fixstep.targets._base import Target
from fixstep.targets.errors import CompileError, TargetError

# The compiler computes some constants beforehand, and with some that are made of others it fails (those of `dct`). They
# are then computed when the module is loaded.
_CONSTANTS_FAILED = b"jit global source initialization order invalid"


def compiler_version() -> str:
    """The version of iree-base-compiler, `3.13.0`."""
    return importlib.metadata.version("iree-base-compiler")


def compile_module(text: str, target: Target, lines: Mapping[int, str]) -> tuple[bytes, dict[str, Any]]:
    """Compile a StableHLO module for a target, through the cache.

    Args:
        text: the module, without locations.
        target: what to compile for.
        lines: the user's `file:line` by line of the text, for messages.

    Returns:
        The VMFB, and what a machine needs to run it.

    Raises:
        TargetError: if the compiler does not know the target's option.
        CompileError: if the compiler failed: one message with the user's line, the full log in a file.
    """
    adapted = target.adapt(text)
    if adapted.count("\n") != text.count("\n"):
        lines = {}  # those of another text: no line is better than a wrong one
    text = adapted
    flags = ["--iree-input-type=stablehlo", *target.compile_flags(text)]
    requirements = target.requirements(_configured(target.text, target.adapt("module {\n}"), tuple(flags)), text)
    # `host` means another processor on another machine, so what it was resolved to is part of the key.
    key = _cache.cache_key(
        text, [*flags, repr(requirements), *(edit.name for edit in target.code_edits(text))], compiler_version()
    )
    module = _cache.lookup(key)
    if module is None:
        module = _run(text, flags, target, lines, key)
        _cache.store(key, module)
    return module, requirements


@functools.lru_cache
def _configured(target: str, empty: str, flags: tuple[str, ...]) -> str:
    """The target attribute that the compiler makes of flags, from an empty module as the target needs it."""
    done = _iree_compile(empty, [*flags, "--compile-to=flow", "-o", "-"])
    log = done.stderr.decode(errors="replace")
    if done.returncode or "not a recognized processor" in log or "Unknown CPU" in log:
        raise TargetError(f"the compiler does not know target {target!r}: {_short(log)}")
    return done.stdout.decode(errors="replace")


def _run(text: str, flags: list[str], target: Target, lines: Mapping[int, str], key: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "module.vmfb"
        done, edited = _compiled(text, flags, target, output)
        if done.returncode and _CONSTANTS_FAILED in done.stderr:
            done, edited = _compiled(text, [*flags, "--iree-opt-const-eval=false"], target, output)
        if done.returncode == 0:
            return output.read_bytes()
    if edited:
        lines = {}  # those of the text before the edits
    log = done.stderr.decode(errors="replace")
    raise CompileError(_message(log, done.returncode, target, lines, _write_log(key, text, log)))


def _compiled(
    text: str, flags: list[str], target: Target, output: Path
) -> tuple[subprocess.CompletedProcess[bytes], bool]:
    """Compile to a file, in parts where the target edits the code in between; and whether the last part was edited."""
    start: list[str] = []
    for number, edit in enumerate(target.code_edits(text)):
        code = output.with_suffix(f".{number}.mlir")
        done = _iree_compile(text, [*flags, *start, f"--compile-to={edit.phase}", "-o", str(code)])
        if done.returncode:
            return done, bool(start)
        text, start = edit.apply(code.read_text()), [f"--compile-from={edit.phase}"]
    return _iree_compile(text, [*flags, *start, "-o", str(output)]), bool(start)


def _iree_compile(text: str, flags: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        tool = binaries.find_tool("iree-compile")
        return subprocess.run([tool, "-", *flags], input=text.encode(), capture_output=True, check=False)
    except (ValueError, OSError) as exc:
        raise CompileError(
            f"iree-compile does not start: {exc}; install it with: pip install 'fixstep[compile]'"
        ) from exc


def _message(log: str, code: int, target: Target, lines: Mapping[int, str], log_file: str) -> str:
    """What failed, on which line of the user's, for which target, and where the rest is."""
    found = re.search(r"<stdin>:(\d+):\d+: error: (.*)", log)
    if found is None:
        what = f"the compiler ended with signal {-code}" if code < 0 else _short(log)
        where = ""
    else:
        operation = re.search(r"'([\w.]+)'", found.group(2))
        what = found.group(2)[:200] if operation is None else f"{operation.group(1)}: {found.group(2)[:160]}"
        line = next((lines[n] for n in range(int(found.group(1)), 0, -1) if n in lines), None)
        where = f", at {line}" if line else ""
    return (
        f"compiling for {target.text} failed{where}:\n  {what}\n"
        f"The full log is in {log_file}. If the line is a single operation, write it in terms of others."
    )


def _short(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return (errors or lines or ["no message"])[0][:200]


def _write_log(key: str, text: str, log: str) -> str:
    """Keep the log and the module where the user can find them; falls back to a temporary file."""
    folder = _cache.cache_folder() / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{key[:16]}.log"
        path.write_text(log + "\n\n// the module\n" + text)
    except OSError:
        handle, name = tempfile.mkstemp(prefix="fixstep-", suffix=".log")
        with os.fdopen(handle, "w") as file:
            file.write(log)
        path = Path(name)
    return str(path)
