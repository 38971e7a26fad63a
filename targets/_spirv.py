"""Changes to SPIR-V code, in the text form that IREE prints before it writes the binary."""

from __future__ import annotations

import re

_ARITHMETIC = re.compile(r"^(\s*)(%\w+) = spirv\.(F(?:Add|Sub|Mul|Div|Rem|Negate)) (%\w+)(?:, (%\w+))? : (.*)$")
_CONSTANT = re.compile(r"^\s*(%\w+) = spirv\.Constant (?:dense<)?([^ >]+)>? : ")
_EXACT = "{no_contraction}"


def exact_arithmetic(code: str) -> str:
    """Float arithmetic that drivers may not rearrange.

    Without the decoration a driver may take it that there are no infinities and no rounding: Mesa makes 0 of `x - x`
    and b of `(a + b) - a`, which is what every correction for rounding is made of. Mesa's software driver makes 0 of
    `x * 0` and of `0 / x` even so; they are written as `(x - x) * x`, and that of 1 / x, which are the same numbers.
    """
    zeros: dict[str, bool] = {}
    return "\n".join(_exact(line, zeros) for line in code.split("\n"))


def _exact(line: str, zeros: dict[str, bool]) -> str:
    """One line; `zeros` are the constants seen so far whose value is zero, and whether it is -0."""
    constant = _CONSTANT.match(line)
    if constant is not None:
        name, value = constant.groups()
        zeros.pop(name, None)  # of the function before
        if re.fullmatch(r"-?0\.0+e\+00", value):
            zeros[name] = value.startswith("-")
        return line
    found = _ARITHMETIC.match(line)
    if found is None:
        return line
    indent, name, operation, left, right, type_ = found.groups()
    if operation == "FMul" and (left in zeros or right in zeros):
        x, zero = (left, right) if right in zeros else (right, left)
        return indent + _times_zero(name, x, type_, negative=zeros[zero])
    if operation == "FDiv" and left in zeros:
        return indent + _zero_by(name, right, type_, negative=zeros[left])
    operands = left if right is None else f"{left}, {right}"
    return f"{indent}{name} = spirv.{operation} {operands} {_EXACT} : {type_}"


def _times_zero(name: str, x: str, type_: str, *, negative: bool) -> str:
    """0 * x: (x - x) * x."""
    zero, minus = f"%edited_zero_{name[1:]}", f"%edited_minus_{name[1:]}"
    parts = [f"{zero} = spirv.FSub {x}, {x} {_EXACT} : {type_}"]
    if negative:
        parts.append(f"{minus} = spirv.FNegate {x} {_EXACT} : {type_}")
    parts.append(f"{name} = spirv.FMul {zero}, {minus if negative else x} {_EXACT} : {type_}")
    return " ".join(parts)


def _zero_by(name: str, x: str, type_: str, *, negative: bool) -> str:
    """0 / x: 0 * (1 / x)."""
    one, inverse = f"%edited_one_{name[1:]}", f"%edited_inverse_{name[1:]}"
    value = f"dense<1.0> : {type_}" if type_.startswith("vector") else f"1.0 : {type_}"
    parts = [f"{one} = spirv.Constant {value}", f"{inverse} = spirv.FDiv {one}, {x} {_EXACT} : {type_}"]
    return " ".join([*parts, _times_zero(name, inverse, type_, negative=negative)])
