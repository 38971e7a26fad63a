"""Writes the handwritten digits that scikit-learn ships as digits-train.npz and digits-test.npz. Needs no JAX."""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = digits.images[order].astype(np.float32)  # (1797, 8, 8), 0 to 16
    y = digits.target[order].astype(np.int32)
    np.savez(folder / "digits-train.npz", x=x[360:], y=y[360:])
    np.savez(folder / "digits-test.npz", x=x[:360], y=y[:360])
    print(f"wrote {folder / 'digits-train.npz'} (1437 digits) and {folder / 'digits-test.npz'} (360)")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
