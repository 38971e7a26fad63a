"""JSON for files that may be damaged or hostile: bounded in size and depth, no key twice, no NaN."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

MAX_DEPTH = 32
"""Lists and objects inside one another; the files need fewer than ten."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def parse_json(data: bytes | memoryview, *, limit: int) -> Any:
    """The value of a JSON text.

    Args:
        data: the text in UTF-8.
        limit: the longest text that is looked at, in bytes.

    Raises:
        ValueError: saying what is wrong: length, encoding, syntax, depth, a key that occurs twice, a number that is
            not finite.
    """
    if len(data) > limit:
        raise ValueError(f"{len(data)} bytes of JSON, more than the {limit} that are allowed")
    raw = bytes(data)
    _check_depth(raw)
    try:
        return json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as exc:
        raise ValueError(f"byte {exc.start} is not UTF-8") from exc
    except json.JSONDecodeError as exc:
        raise ValueError(f"not JSON: {exc}") from exc
    except RecursionError as exc:
        raise ValueError("JSON nested too deeply") from exc


def _check_depth(raw: bytes) -> None:
    """Brackets outside strings, counted before the parser recurses over them."""
    text = np.frombuffer(_STRING.sub(b"", raw), np.uint8)
    opening = (text == ord("[")) | (text == ord("{"))
    closing = (text == ord("]")) | (text == ord("}"))
    depth = np.cumsum(opening.astype(np.int32) - closing.astype(np.int32))
    if depth.size and int(depth.max()) > MAX_DEPTH:
        raise ValueError(f"JSON nested {int(depth.max())} deep, more than the {MAX_DEPTH} that are allowed")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice in one object")
            seen.add(key)
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def json_problems(value: Any, where: str, depth: int = 0) -> list[str]:
    """Why a Python value would not come back from JSON as it is; empty if it would (a tuple comes back as a list).

    Args:
        value: what is to be written.
        where: the name of the value in the messages.
        depth: how many containers it already sits in.
    """
    if value is None or isinstance(value, bool | str):
        return []
    if isinstance(value, int):
        return [] if value.bit_length() <= 4096 else [f"{where}: an integer of {value.bit_length()} bits"]
    if isinstance(value, float):
        return [] if math.isfinite(value) else [f"{where}: {value}, which JSON cannot hold"]
    if depth >= MAX_DEPTH:
        return [f"{where}: nested more than {MAX_DEPTH} deep"]
    if isinstance(value, dict):
        found = [f"{where}: the key {key!r} is not text" for key in value if not isinstance(key, str)]
        for key, child in value.items():
            found += json_problems(child, f"{where}/{key}", depth + 1)
        return found
    if isinstance(value, list | tuple):
        found = []
        for index, child in enumerate(value):
            found += json_problems(child, f"{where}/{index}", depth + 1)
        return found
    return [f"{where}: a {type(value).__name__}, which JSON cannot hold"]


def dump_json(value: Any) -> str:
    """Compact JSON text; the same value gives the same text.

    Raises:
        ValueError: for a number that is not finite.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
