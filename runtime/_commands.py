"""The commands inspect, predict and export; run has a file of its own, `_run_command.py`, and plot `_plot.py`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fixstep.runtime._artifact import Artifact
from fixstep.runtime._checkpoint import CheckpointDirectory, read_checkpoint
from fixstep.runtime._cli import DONE, Run
from fixstep.runtime._inspect import describe_artifact
from fixstep.runtime._load import load
from fixstep.runtime._npz import load_npz
from fixstep.runtime._predict import choose_inputs, predict_all, write_predictions
from fixstep.runtime._signature import describe
from fixstep.runtime._weights import write_weights
from fixstep.targets.errors import CheckpointError, DataError


def inspect_command(parser: argparse.ArgumentParser) -> Run:
    """Show what an artifact holds: its template, functions, fixpoint report, targets, versions and sizes."""
    parser.add_argument("artifact", type=Path, help="a .fixstep file")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    parser.add_argument("--all", action="store_true", help="show long tables whole")
    return _inspect


def _inspect(arguments: argparse.Namespace) -> int:
    artifact = Artifact.open(arguments.artifact)
    if arguments.json:
        print(json.dumps(artifact.manifest, indent=1, ensure_ascii=False))
    else:
        print(describe_artifact(artifact, every_leaf=arguments.all))
    return DONE


def predict_command(parser: argparse.ArgumentParser) -> Run:
    """Run an artifact's predict over a .npz file, with the state of a checkpoint.

    Every example has its prediction, in the order of the file. Arrays that predict does not take are ignored.
    """
    parser.add_argument("artifact", type=Path, help="a .fixstep file")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="PATH", help="a checkpoint, or a folder of them"
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="a .npz file")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the .npz file to write")
    parser.add_argument("--target", metavar="TARGET", help="cpu:host or cpu; by default the best one present")
    parser.add_argument("--device", metavar="DEVICE", help="which device of the target")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    return _predict


def _predict(arguments: argparse.Namespace) -> int:
    session = load(arguments.artifact, target=arguments.target, device=arguments.device)
    session.signature("predict")  # says so at once where there is none
    if not arguments.output.parent.is_dir():
        raise DataError(f"{arguments.output}: no folder to write to: make {arguments.output.parent}, or choose another")
    checkpoint = _checkpoint(arguments.checkpoint)
    session.restore(checkpoint)
    arrays, ignored = choose_inputs(load_npz(arguments.data), session.signature("predict"), arguments.data)
    predictions = predict_all(session, arrays)
    write_predictions(arguments.output, predictions)
    if not arguments.quiet:
        if ignored:
            print(f"ignored, as predict does not take them: {', '.join(ignored)}")
        shapes = ", ".join(f"{name} {describe(a.dtype.name, a.shape)}" for name, a in predictions.items())
        print(f"wrote {arguments.output}: {shapes}, with {checkpoint} ({session.steps} steps)")
    return DONE


def export_command(parser: argparse.ArgumentParser) -> Run:
    """Write the weights of a checkpoint to a safetensors file, under the names that the model has for them."""
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of them")
    parser.add_argument(
        "--under", default="params", metavar="LEAF", help="the leaf path below which names begin (default params)"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    return _export


def _export(arguments: argparse.Namespace) -> int:
    path = _checkpoint(arguments.checkpoint)
    saved = read_checkpoint(path)
    names = write_weights(arguments.output, saved.leaves, saved.template, under=arguments.under)
    if not arguments.quiet:
        print(f"wrote {arguments.output}: {len(names)} tensors of {path} ({saved.steps} steps)")
        print("\n".join(f"  {name}" for name in names))
    return DONE


def _checkpoint(path: Path) -> Path:
    if not path.is_dir():
        return path
    latest = CheckpointDirectory(path).latest().path
    if latest is None:
        raise CheckpointError(f"{path}: a folder without checkpoints")
    return latest
