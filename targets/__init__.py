"""The targets that fixstep compiles for and runs on, one file each; a new target is one new file in this folder."""

from fixstep.targets._registry import families, parse

__all__ = ["families", "parse"]
