"""Changes to the StableHLO text that a target's code generator needs and that change no number.

Each writes what it adds on the line of the operation that it replaces, so that line numbers keep their meaning.
"""

from __future__ import annotations

import math
import re

_NAME = r"%[\w#]+"
_PRODUCT = re.compile(
    rf"^(\s*)(%\w+) = (stablehlo\.(?:dot_general |convolution\())({_NAME}), ({_NAME})(.*) : "
    r"\(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>(.*)$"
)
_SELECT = re.compile(
    rf"^(\s*)(%\w+) = stablehlo\.select ({_NAME}), ({_NAME}), ({_NAME}) : "
    r"(tensor<[^>]*>), tensor<([^>]*)complex<(f\d+)>>(.*)$"
)
_BROADCAST = re.compile(
    rf"^(\s*)(%\w+) = stablehlo\.broadcast_in_dim ({_NAME}), (.*) : \(tensor<([^>]+)>\) -> tensor<([^>]+)>(.*)$"
)
_TRANSPOSE = re.compile(
    rf"^(\s*)(%\w+) = stablehlo\.transpose ({_NAME}), (.*) : \((tensor<[^>]+>)\) -> tensor<[^>]+>.*$"
)
_SUM = re.compile(
    rf"^(\s*)(%\w+) = stablehlo\.reduce\(({_NAME}) init: {_NAME}\) applies \S+ across dimensions = \[([\d, ]+)\] : "
    r"\((tensor<((?:\d+x)+)[^>]+>),.*$"
)
_SCATTER = re.compile(rf'^(\s*)(%\w+)(?::\d+)? = "stablehlo\.scatter"\(((?:{_NAME}(?:, )?)+)\)')
_FROM_INTEGER = re.compile(
    rf"^(\s*)(%\w+) = stablehlo\.convert ({_NAME}) : \(tensor<((?:\d+x)*u?i\d+)>\) -> tensor<((?:\d+x)*)bf16>(.*)$"
)
_FROM_BOOL = re.compile(
    rf"^(\s*)(%\w+) = stablehlo\.convert ({_NAME}) : \(tensor<((?:\d+x)*)i1>\) -> (tensor<(?:\d+x)*b?f\d+>)(.*)$"
)
_REDUCE = re.compile(r"stablehlo\.reduce\(.*: \(tensor<([^>]+)>.* -> \(?tensor<([^>]+)>")
_CONSTANT = re.compile(r"%c(?:st)?(?:_\d+)?")
# Arguments of functions and carries of loops are in memory of their own.
_STORED = ("%arg", "%iterArg", "%adapted_")
_VALUE = re.compile(_NAME)
_NARROW = re.compile(r"(?<=x)b?f16$|^b?f16$")


def separate_narrow_products(module: str) -> str:
    """Matrix products and convolutions of 16-bit floats as those of float32, with nothing narrow fused into them.

    A product of two such numbers is exact in float32. IREE's SPIR-V for products loads bfloat16 in vectors, which it
    then cannot lower ("failed to legalize operation 'vector.bitcast'"), and gives wrong numbers where an update in
    float16, or a difference of numbers that were 8-bit integers, is fused into a product of 6 by 16. Elementwise code
    of its own is right.
    """
    if not any(narrow in module for narrow in ("f16>", "i16>", "i8>")):
        return module
    return "\n".join(_separate(line) for line in module.split("\n"))


def _separate(line: str) -> str:
    found = _PRODUCT.match(line)
    # Narrow neighbours are fused into products of float32 too, so those are separated as well.
    if found is None or not found.group(9).endswith(("f16", "f32")):
        return line
    indent, name, operation, left, right, middle, left_type, right_type, result_type, rest = found.groups()
    wide = [_NARROW.sub("f32", text) for text in (left_type, right_type, result_type)]
    own = f"%adapted_{name[1:]}"
    parts = [
        _converted(f"{own}_left", left, left_type, wide[0]),
        _converted(f"{own}_right", right, right_type, wide[1]),
        f"{own}:2 = stablehlo.optimization_barrier {own}_left, {own}_right : tensor<{wide[0]}>, tensor<{wide[1]}>",
        f"{own}_product = {operation}{own}#0, {own}#1{middle} : "
        f"(tensor<{wide[0]}>, tensor<{wide[1]}>) -> tensor<{wide[2]}>{rest}",
        f"{own}_result = stablehlo.optimization_barrier {own}_product : tensor<{wide[2]}>",
        _converted(name, f"{own}_result", wide[2], result_type),
    ]
    return indent + " ".join(parts)


def _converted(name: str, operand: str, before: str, after: str) -> str:
    """A conversion; one to the same type is left out by the compiler."""
    return f"{name} = stablehlo.convert {operand} : (tensor<{before}>) -> tensor<{after}>"


def round_integers_first(module: str) -> str:
    """Integers become bfloat16 by way of float32, as in XLA, and are rounded before the last step.

    The conversion in one compiles neither to SPIR-V ("mismatch in result type bitwidth 16 and operand type bitwidth
    32") nor for portable x86-64 ("undefined symbol: __truncsfbf2"), and of two conversions IREE makes one.
    """
    if "bf16>" not in module:
        return module
    return "\n".join(_FROM_INTEGER.sub(_rounded, line) for line in module.split("\n"))


def _rounded(found: re.Match[str]) -> str:
    indent, name, operand, before, shape, rest = found.groups()
    own, wide = f"%adapted_{name[1:]}", f"tensor<{shape}f32>"
    parts = [
        f"{own}_wide = stablehlo.convert {operand} : (tensor<{before}>) -> {wide}",
        f"{own} = stablehlo.reduce_precision {own}_wide, format = e8m7 : {wide}",
        f"{name} = stablehlo.convert {own} : ({wide}) -> tensor<{shape}bf16>{rest}",
    ]
    return indent + " ".join(parts)


def select_for_booleans(module: str) -> str:
    """Booleans become floats by a selection between one and zero.

    Where IREE's SPIR-V handles four at a time, it has no conversion ("failed to legalize operation 'arith.sitofp'").
    """
    return "\n".join(_FROM_BOOL.sub(_selected, line) for line in module.split("\n"))


def _selected(found: re.Match[str]) -> str:
    indent, name, operand, shape, result, rest = found.groups()
    own = f"%adapted_{name[1:]}"
    constants = [f"{own}_{value} = stablehlo.constant dense<{value}.0> : {result}" for value in (1, 0)]
    select = f"{name} = stablehlo.select {operand}, {own}_1, {own}_0 : tensor<{shape}i1>, {result}{rest}"
    return indent + " ".join([*constants, select])


def split_complex_selects(module: str) -> str:
    """Selections between complex numbers as two between their parts, which is all that SPIR-V has."""
    if "complex<" not in module:
        return module
    return "\n".join(_split(line) for line in module.split("\n"))


def _split(line: str) -> str:
    found = _SELECT.match(line)
    if found is None:
        return line
    indent, name, chosen, yes, no, chosen_type, shape, element, rest = found.groups()
    whole, part = f"tensor<{shape}complex<{element}>>", f"tensor<{shape}{element}>"
    own = f"%adapted_{name[1:]}"
    parts = []
    for half in ("real", "imag"):
        taken = f"{own}_{half}"
        parts += [
            f"{taken}_{which} = stablehlo.{half} {value} : ({whole}) -> {part}"
            for which, value in (("yes", yes), ("no", no))
        ]
        parts.append(f"{taken} = stablehlo.select {chosen}, {taken}_yes, {taken}_no : {chosen_type}, {part}{rest}")
    parts.append(f"{name} = stablehlo.complex {own}_real, {own}_imag : {whole}")
    return indent + " ".join(parts)


def separate_movements(module: str) -> str:
    """Nothing that makes an array is fused with what repeats its elements, transposes it, or reduces its columns.

    IREE's SPIR-V for a sum along columns and a use of it in every row holds the sums in memory that a workgroup shares,
    and has no barrier between the threads that write and those that read: `x - x.mean(0)` was right in the columns of
    one subgroup and wrong in the others. So was the sum of a product and another one transposed, and that of columns
    where something else reads the columns too. Scalars and constants are computed by each thread.
    """
    barriers: list[tuple[int, str, str]] = []  # indentation, value, and what stands for it from there on
    lines = []
    for line in module.split("\n"):
        indent = len(line) - len(line.lstrip())
        barriers = [known for known in barriers if known[0] <= indent]  # the others' regions have ended
        line = _replaced(line, {value: barrier for _, value, barrier in barriers})
        found = _moved(line)
        if found is not None:
            name, operand, type_ = found
            barrier = f"%adapted_{name[1:]}"
            barriers.append((indent, operand, barrier))
            made = f"{' ' * indent}{barrier} = stablehlo.optimization_barrier {operand} : {type_} "
            line = made + re.sub(rf"{operand}(?![\w#])", barrier, line[indent:])
        lines.append(line)
    return "\n".join(lines)


def separate_scatters(module: str) -> str:
    """Nothing is fused with what scatters elements into its result.

    IREE's code generator for GPUs divides both among threads in different ways, and fails ("failed to apply fusion +
    hoisting patterns").
    """
    lines = module.split("\n")
    for index, line in enumerate(lines):
        found = _SCATTER.match(line)
        if found is None:
            continue
        indent, name, operands = found.groups()
        # The types stand behind the region that combines two elements.
        end = next(later for later in lines[index + 1 :] if later.startswith(f"{indent}}}) : ("))
        types = end.partition("(")[2].partition(")")[0]
        own = f"%adapted_{name[1:]}"
        count = operands.count("%")
        made = f"{own}:{count} = stablehlo.optimization_barrier {operands} : {types} "
        behind = ", ".join(f"{own}#{number}" for number in range(count))
        lines[index] = indent + made + line[len(indent) :].replace(f"({operands})", f"({behind})", 1)
    return "\n".join(lines)


def _replaced(line: str, values: dict[str, str]) -> str:
    """A line with other values in the place of some."""
    return _VALUE.sub(lambda found: values.get(found.group(), found.group()), line)


def _moved(line: str) -> tuple[str, str, str] | None:
    """Name, operand and the operand's type of a line that moves elements of what has to stand alone."""
    repeated, transposed, summed = _BROADCAST.match(line), _TRANSPOSE.match(line), _SUM.match(line)
    if repeated is not None:
        _, name, operand, _, before, after, _ = repeated.groups()
        type_ = f"tensor<{before}>"
        if _CONSTANT.fullmatch(operand) or not 1 < _count(before) < _count(after):
            return None
    elif transposed is not None:
        _, name, operand, _, type_ = transposed.groups()
    elif summed is not None:
        _, name, operand, axes, type_, shape = summed.groups()
        if str(shape.count("x") - 1) in axes.split(", "):
            return None  # along rows, which one thread or the whole workgroup adds up
    else:
        return None
    return None if operand.startswith(_STORED) else (name, operand, type_)


def longest_reduction(module: str) -> int:
    """The most elements that one sum, extremum or product of matrices takes together."""
    longest = 0
    for line in module.split("\n"):
        reduced, product = _REDUCE.search(line), _PRODUCT.match(line)
        if reduced is not None:
            longest = max(longest, _count(reduced.group(1)) // max(1, _count(reduced.group(2))))
        elif product is not None and "dot_general" in product.group(3):
            left, right, result = (_count(product.group(n)) for n in (7, 8, 9))
            longest = max(longest, math.isqrt(left * right // max(1, result)))
    return longest


def _count(shape: str) -> int:
    """Elements of a shape such as `8x16xf32`."""
    return math.prod(int(size) for size in re.findall(r"(\d+)x", shape))
