"""Writes text-train.npz and text-test.npz from the documentation topics that every Python ships. Needs no JAX."""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

TIME = 64


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    windows = tokens[: len(tokens) // (TIME + 1) * (TIME + 1)].reshape(-1, TIME + 1)
    windows = windows[np.random.default_rng(0).permutation(len(windows))]
    held_out = 512
    np.savez(folder / "text-train.npz", tokens=windows[held_out:])
    np.savez(folder / "text-test.npz", tokens=windows[:held_out])
    print(f"wrote {folder / 'text-train.npz'} ({len(windows) - held_out} windows) and {folder / 'text-test.npz'} (512)")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
