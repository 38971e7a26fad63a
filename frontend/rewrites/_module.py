"""The passes over a lowered module, in their order."""

from __future__ import annotations

from typing import Any

from fixstep.frontend.rewrites._added_zero import drop_added_zeros
from fixstep.frontend.rewrites._carries import keep_carries
from fixstep.frontend.rewrites._clean import clean
from fixstep.frontend.rewrites._constants import hide_constants
from fixstep.frontend.rewrites._copies import guard_copies
from fixstep.frontend.rewrites._gather import clamp_gathers
from fixstep.frontend.rewrites._inline import inline_calls
from fixstep.frontend.rewrites._replace import replace_operations
from fixstep.frontend.rewrites._stable import keep_order_of_equals
from fixstep.frontend.rewrites._strided import copy_strided_slices
from fixstep.frontend.rewrites._unused import use_sorted_keys


def rewrite_module(module: Any) -> None:
    """Rewrite a StableHLO module in place, so that IREE computes what JAX meant.

    Args:
        module: a `jaxlib.mlir.ir.Module`; its context must have the StableHLO dialect.
    """
    with module.context:
        clean(module)
        inline_calls(module)
        drop_added_zeros(module)
        clamp_gathers(module)
        replace_operations(module)
        copy_strided_slices(module)
        hide_constants(module)
        keep_order_of_equals(module)
        copies = guard_copies(module)
        use_sorted_keys(module)
        keep_carries(module, copies)
        module.operation.verify()
