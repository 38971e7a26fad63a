"""Types of less than eight bits, and eight-bit floats: carried in wider ones, because no target computes with them.

IREE has no arithmetic below eight bits, no code for eight-bit floats on GPUs, and rounds some of them wrongly on the
CPU. The compiled functions take and give the bits of such leaves as uint8; inside, each operation's result is brought
back to the numbers that the narrow type has.
"""

from fixstep.frontend.narrow._codes import NARROW
from fixstep.frontend.narrow._evaluate import without_narrow_types

__all__ = ["NARROW", "without_narrow_types"]
