"""The command line `fixstep`: finds the subcommands, runs one, and turns errors into messages and exit codes.

A subcommand is an entry point of the group `fixstep.commands`: a function `configure(parser) -> run` that adds its
arguments to an `argparse.ArgumentParser` and returns the function `run(arguments) -> exit code` (None counts as 0).
Its docstring is the description in `fixstep <name> --help`. Only the function of the command that was asked for is
imported, so `fixstep run` starts without the frontend.

Exit codes: 0 done; 1 a check failed (`MismatchError`, `NonFiniteError`); 2 the input was wrong; 70 a fault of fixstep
itself; 130 and 143 stopped by SIGINT and SIGTERM (after the step was finished and saved); 141 the reader of the output
went away.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.metadata
import inspect
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence

from fixstep.runtime._config import CommandParser
from fixstep.targets.errors import FixstepError, MismatchError, NonFiniteError

Run = Callable[[argparse.Namespace], int | None]
Configure = Callable[[argparse.ArgumentParser], Run]

GROUP = "fixstep.commands"
DONE, CHECK_FAILED, WRONG_INPUT, FAULT = 0, 1, 2, 70
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 141

# Known here so that `fixstep --help` lists every command where JAX is absent, and imports none of them.
_SUMMARIES = {
    "compile": "compile a training step to an artifact (needs fixstep[compile])",
    "inspect": "show what an artifact holds: template, functions, report, targets, sizes",
    "run": "train: run an artifact's step over data, with checkpoints and validation",
    "predict": "run an artifact's predict over data with the state of a checkpoint",
    "plot": "draw the metrics of runs as PNG or SVG (needs fixstep[plot])",
    "verify": "compare an artifact with JAX, leaf by leaf (needs fixstep[compile])",
    "bench": "time an artifact against jax.jit (needs fixstep[compile])",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; those of the process if None.

    Returns:
        The exit code (see the module's docstring).
    """
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except (MismatchError, NonFiniteError) as exc:
        return _fail(str(exc), CHECK_FAILED)
    except FixstepError as exc:
        return _fail(str(exc), WRONG_INPUT, exc)
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("fixstep: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename is not None else ""
        return _fail(f"{where}{exc.strerror or exc}", WRONG_INPUT, exc)
    except Exception as exc:  # a fault of ours; the user gets one line and a file to send
        return _report_fault(exc)


def _dispatch(argv: list[str]) -> int:
    commands = _commands()
    if not argv or argv[0] in ("-h", "--help"):
        print(_help(commands))
        return DONE if argv else WRONG_INPUT
    if argv[0] == "--version":
        print(f"fixstep {importlib.metadata.version('fixstep')}")
        return DONE
    name = argv[0]
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        kind = "option" if name.startswith("-") else "command"
        return _fail(f"no {kind} {name!r}{hint}; the commands are {', '.join(commands)}", WRONG_INPUT)
    try:
        configure: Configure = commands[name].load()
        description = inspect.cleandoc(configure.__doc__ or _SUMMARIES.get(name, ""))
        parser = CommandParser(
            prog=f"fixstep {name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        run = configure(parser)
        try:
            arguments = parser.parse_args(argv[1:])
        except SystemExit as exit_:  # argparse has printed its message, or the help
            return int(exit_.code or 0)
        return run(arguments) or DONE
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in ("jax", "jaxlib", "flatbuffers") and exc.name != "iree.compiler":
            raise
        return _fail(
            f"'fixstep {name}' needs {exc.name}, which is not installed; "
            "install what compiles with: pip install 'fixstep[compile]'",
            WRONG_INPUT,
        )


def _commands() -> Mapping[str, importlib.metadata.EntryPoint]:
    """The registered commands: the known ones in their order, then others by name."""
    found = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    order = [*_SUMMARIES, *sorted(found.keys() - _SUMMARIES.keys())]
    return {name: found[name] for name in order if name in found}


def _help(commands: Mapping[str, importlib.metadata.EntryPoint]) -> str:
    lines = [
        "usage: fixstep <command> [options]",
        "",
        "Trains ahead-of-time compiled training steps without JAX.",
        "",
        "commands:",
        *(f"  {name:<9} {_summary(name, point)}" for name, point in commands.items()),
        "",
        "options:",
        "  -h, --help  this text; 'fixstep <command> --help' says more of one command",
        "  --version   the version",
    ]
    return "\n".join(lines)


def _summary(name: str, point: importlib.metadata.EntryPoint) -> str:
    if name in _SUMMARIES:
        return _SUMMARIES[name]
    try:
        return (inspect.getdoc(point.load()) or "").partition("\n")[0]
    except Exception as exc:  # a foreign command that cannot be imported must not take the help away
        return f"(cannot be loaded: {exc})"


def _debugging() -> bool:
    return os.environ.get("FIXSTEP_DEBUG", "0") not in ("", "0")


def _fail(message: str, code: int, exc: BaseException | None = None) -> int:
    if exc is not None and _debugging():
        traceback.print_exception(exc)
    sys.stdout.flush()
    print(f"fixstep: error: {message}", file=sys.stderr)
    return code


def _report_fault(exc: Exception) -> int:
    if _debugging():
        traceback.print_exception(exc)
        return FAULT
    handle, path = tempfile.mkstemp(prefix="fixstep-error-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        traceback.print_exception(exc, file=file)
    first_line = (str(exc).splitlines() or [""])[0]
    return _fail(
        f"unexpected {type(exc).__name__}: {first_line} (this is a fault of fixstep: please report it with {path})",
        FAULT,
    )


def _discard_stdout() -> None:
    """Points stdout at nothing, so that the interpreter's last flush does not complain about the closed pipe."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # where stdout is no file but a test's buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
