"""The list of rules: functions that take the place of a primitive's equation where IREE would compute it wrongly.

A file of rules has one subject and registers its rules on import. Rules see an equation after differentiation and
batching, so they need no derivative of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Primitive = Any
"""A jax.extend.core.Primitive."""
Rule = Callable[..., Any]

RULES: dict[Primitive, list[Rule]] = {}
"""Rules by primitive, in the order of registration."""


def rule(*primitives: Primitive) -> Callable[[Rule], Rule]:
    """Register a function as a rule for primitives.

    The rule is called with the equation's operands and, by keyword, its parameters. It returns the result (a sequence
    of results for a primitive with several), or None where it has nothing to mend. What it computes is not rewritten
    again, so it may use only what IREE computes rightly.

    Args:
        *primitives: what the rule stands in for.

    Returns:
        A decorator that returns the function unchanged.
    """

    def register(function: Rule) -> Rule:
        for primitive in primitives:
            RULES.setdefault(primitive, []).append(function)
        return function

    return register


def apply_rules(primitive: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> list[Any] | None:
    """The results of the first rule that applies to an equation, or None if none does."""
    for function in RULES.get(primitive, ()):
        result = function(*operands, **params)
        if result is not None:
            return list(result) if primitive.multiple_results else [result]
    return None


def all_rules() -> list[str]:
    """Every rule as `file.function`, sorted: the list that a test holds against the tests of rules."""
    names = {
        f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        for rules in RULES.values()
        for function in rules
    }
    return sorted(names)
