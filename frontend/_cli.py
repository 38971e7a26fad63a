"""The commands that need JAX: compile, verify, bench."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from fixstep.frontend._bench import bench_artifact
from fixstep.frontend._compile import Compiled, compile
from fixstep.frontend._program import import_program
from fixstep.frontend._verify import verify_artifact
from fixstep.runtime._artifact import Artifact
from fixstep.runtime._data import ArrayData, load_npz
from fixstep.targets.errors import MismatchError, TargetError

Run = Callable[[argparse.Namespace], int | None]


def compile_command(parser: argparse.ArgumentParser) -> Run:
    """Compile a training step to an artifact.

    The step is traced until its types stop moving, compiled for each target, and compared with JAX on each target
    whose device this machine has; the file appears only if they agree.
    """
    parser.add_argument("program", help="module:attribute of a Program, or of a function that returns one")
    parser.add_argument(
        "--target", action="append", metavar="TARGET", help="cpu, cpu:host, cpu:<processor>, cpu:<triple>; repeatable"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the artifact to write")
    parser.add_argument("--no-verify", action="store_true", help="do not compare with JAX")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")

    def run(arguments: argparse.Namespace) -> None:
        program = import_program(arguments.program)
        compiled = compile(
            program, arguments.output, targets=arguments.target or ["cpu"], verify=not arguments.no_verify
        )
        if not arguments.quiet:
            print(_summary(compiled))

    return run


def _summary(compiled: Compiled) -> str:
    template = compiled.template
    count = len(template.state_leaves)
    lines = [f"{count} state {'leaf' if count == 1 else 'leaves'}; {_rounds(template.rounds)}"]
    width = max((len(change.path) for change in template.changes), default=0)
    for change in template.changes:
        narrowed = "  (narrower)" if change.narrowed else ""
        lines.append(f"  {change.path:<{width}}  {change.before} → {change.after}  in round {change.round}{narrowed}")
    lines += [f"note: {note}" for note in template.notes]
    lines += [result.describe() for result in compiled.verifications]
    lines += [f"{target}: not compared with JAX here: {why}" for target, why in compiled.unverified.items()]
    lines.append(f"wrote {compiled.path} ({compiled.path.stat().st_size / 1e3:.0f} kB)")
    return "\n".join(lines)


def _rounds(rounds: int) -> str:
    if rounds == 0:
        return "the types are a fixed point as they are"
    return f"types moved in {rounds} {'round' if rounds == 1 else 'rounds'}:"


def verify_command(parser: argparse.ArgumentParser) -> Run:
    """Compare an artifact with JAX, leaf by leaf, on every device present.

    JAX runs the StableHLO that the artifact carries, from before fixstep's rewrites. Exits 1 on a mismatch.
    """
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--target", help="only this target")
    parser.add_argument("--steps", type=int, default=10, help="training steps to compare (default 10)")
    parser.add_argument("--data", type=Path, metavar="NPZ", help="batches from this file; made up otherwise")
    parser.add_argument("--seed", type=int, default=0, help="of made-up batches (default 0)")

    def run(arguments: argparse.Namespace) -> None:
        if arguments.steps < 1:
            raise TargetError(f"--steps: expected at least 1, got {arguments.steps}")
        example = _batches(arguments.artifact, arguments.data, arguments.steps) if arguments.data else None
        results, skipped = verify_artifact(
            arguments.artifact, target=arguments.target, steps=arguments.steps, example=example, seed=arguments.seed
        )
        for target, why in skipped.items():
            print(f"{target}: skipped: {why}")
        failed = [result for result in results if not result.passed]
        for result in results:
            if result.passed:
                print(result.describe())
        if failed:
            raise MismatchError("\n".join(result.describe() for result in failed))
        if not results:
            raise TargetError("no target of the artifact runs on this machine, so nothing was compared")

    return run


def _batches(artifact: Path, data: Path, steps: int) -> list[dict[str, object]]:
    specs = Artifact.open(artifact).signature("step", "batch")
    size = specs[0].shape[0] if specs and specs[0].shape else 1
    source = ArrayData(load_npz(data), size, shuffle=False)
    return [dict(batch) for batch, _ in zip(source.batches(0), range(steps), strict=False)]


def bench_command(parser: argparse.ArgumentParser) -> Run:
    """Time an artifact's step against jax.jit of the same function, in one run, in alternation."""
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--target", help="which target (default: the best present)")
    parser.add_argument("--rounds", type=int, default=7, help="how often both are timed (default 7)")

    def run(arguments: argparse.Namespace) -> None:
        timing = bench_artifact(arguments.artifact, target=arguments.target, rounds=max(arguments.rounds, 1))
        low, high = timing.spread
        print(
            f"{timing.target}: {timing.compiled_ms:.3f} ms a step, jax.jit {timing.jit_ms:.3f} ms; "
            f"ratio {timing.ratio:.2f} ({low:.2f} to {high:.2f}; below 1 the artifact is faster)"
        )

    return run
