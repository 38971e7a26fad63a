"""Makes stable sorts stable.

Stands against IREE exchanging neighbours that are equal: of equal keys the later comes first or not, as the data are,
where StableHLO and JAX keep their order. `argsort`, `top_k` and what routes by rank then give other numbers than JAX.

IREE exchanges two neighbours unless the comparison says that the first comes before the second. A comparison that says
"not after" instead exchanges only what has to be.
"""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from fixstep.frontend.rewrites._walk import operations, terminator


def keep_order_of_equals(module: Any) -> int:
    """Turn the comparison of every sort that is to be stable around, in place.

    Returns:
        The number of sorts.
    """
    count = 0
    for op in operations(module):
        if (
            op.name == "stablehlo.sort"
            and "is_stable" in op.attributes
            and ir.BoolAttr(op.attributes["is_stable"]).value
        ):
            _turn_around(op.regions[0])
            count += 1
    return count


def _turn_around(comparison: Any) -> None:
    """Make `before(a, b)` into `not before(b, a)`."""
    block = comparison.blocks[0]
    end = terminator(comparison)
    pairs = list(zip(block.arguments[::2], block.arguments[1::2], strict=True))
    uses = [
        (use.owner, use.operand_number, other)
        for a, b in pairs
        for mine, other in ((a, b), (b, a))
        for use in mine.uses
    ]
    for owner, index, other in uses:
        owner.operation.operands[index] = other
    with ir.InsertionPoint(end), end.location:
        end.operands[0] = stablehlo.not_(end.operands[0])
