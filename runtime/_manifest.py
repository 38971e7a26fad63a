"""The manifest of an artifact: its values as types, and the check of every field. `docs/artifact.md` specifies it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fixstep.runtime._contradictions import contradictions
from fixstep.runtime._signature import LeafSpec
from fixstep.runtime._sizes import Sizes

MANIFEST_FORMAT = "fixstep"
MANIFEST_VERSION = 1
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.safetensors"
MAX_MANIFEST_BYTE_LENGTH = 64 * 2**20
MAX_LEAVES = 1_000_000
MAX_RANK = 32
MAX_PATH_LENGTH = 4096
MAX_SHOWN_PROBLEMS = 20

# What each function takes and gives, in order; a group without leaves is there all the same.
CONVENTION: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "init": (("seed",), ("state",)),
    "step": (("state", "accumulators", "batch"), ("state", "accumulators", "metrics")),
    "evaluate": (("state", "accumulators", "batch"), ("accumulators", "metrics")),
    "predict": (("state", "inputs"), ("outputs",)),
}

# Functions of a batch whose size is a range take the real one last.
_SIZED = ("step", "evaluate", "predict")
_SIZE_ROLES = ("batch", "inputs", "metrics", "evaluation", "outputs")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DTYPE = re.compile(r"bool|b?(u?int|float|complex)[0-9]+[a-z0-9_]*")
_LEAF_KEYS = ("path", "dtype", "shape", "key")
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that travel together: one role of a function's arguments or results."""

    role: str
    leaves: tuple[LeafSpec, ...]


@dataclasses.dataclass(frozen=True)
class Function:
    """One compiled function: its groups of arguments and of results, in calling order."""

    name: str
    arguments: tuple[Group, ...]
    results: tuple[Group, ...]

    def leaves(self, role: str) -> tuple[LeafSpec, ...]:
        """The leaves of a role, of the arguments if they have it, else of the results.

        Raises:
            KeyError: naming the roles that there are.
        """
        for group in (*self.arguments, *self.results):
            if group.role == role:
                return group.leaves
        roles = sorted({group.role for group in (*self.arguments, *self.results)})
        raise KeyError(f"{self.name} has no {role!r}; it has {', '.join(roles)}")


@dataclasses.dataclass(frozen=True)
class Template:
    """The leaves of the state, of a batch, and of what `predict` takes."""

    state: tuple[LeafSpec, ...]
    batch: tuple[LeafSpec, ...]
    inputs: tuple[LeafSpec, ...]


@dataclasses.dataclass(frozen=True)
class CompiledTarget:
    """One target of an artifact: its text, its module's member, what it requires, the compiler's flags."""

    text: str
    module: str
    requires: Mapping[str, Any]
    flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Member:
    """Length in bytes and SHA-256, in hexadecimal, of one member."""

    byte_length: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All that the manifest says, typed and checked."""

    name: str
    program: str
    template: Template
    functions: Mapping[str, Function]
    sizes: Sizes | None
    targets: tuple[CompiledTarget, ...]
    members: Mapping[str, Member]
    versions: Mapping[str, str]


def check_version(raw: Any) -> None:
    """Refuse what is no manifest, or one of another version.

    Raises:
        ValueError: saying which, and what to do.
    """
    if not isinstance(raw, dict) or raw.get("format") != MANIFEST_FORMAT:
        got = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise ValueError(f"the manifest's format is {got!r}, expected {MANIFEST_FORMAT!r}")
    version = raw.get("version")
    if type(version) is int and version > MANIFEST_VERSION:
        raise ValueError(f"version {version}, and this fixstep reads {MANIFEST_VERSION}: upgrade fixstep")
    if type(version) is not int or version != MANIFEST_VERSION:
        raise ValueError(f"version {version!r}, and this fixstep reads {MANIFEST_VERSION}: compile it again")


def parse_manifest(raw: Any) -> Manifest:
    """The typed values of a manifest.

    Args:
        raw: what its JSON says.

    Raises:
        ValueError: listing everything that is wrong with it (the first 20 things, and how many more there are).
    """
    check_version(raw)
    reader = _Reader()
    manifest = reader.manifest(raw)
    _raise("the manifest is not valid", reader.problems or contradictions(manifest, STATE_NAME))
    return manifest


def parse_leaves(raw: Any, what: str) -> tuple[LeafSpec, ...]:
    """The leaves that a JSON value lists, checked one by one.

    Args:
        raw: what the JSON says.
        what: the name of the list in messages.

    Raises:
        ValueError: listing everything that is wrong.
    """
    reader = _Reader()
    leaves = reader.leaves({what: raw}, what, "")
    _raise(f"the {what} is not valid", reader.problems)
    return leaves


def leaf_to_json(leaf: LeafSpec) -> dict[str, Any]:
    """A leaf as the manifest and a checkpoint's template hold it."""
    return {"path": leaf.path, "dtype": leaf.dtype, "shape": list(leaf.shape), "key": leaf.key}


def _raise(title: str, problems: list[str]) -> None:
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:MAX_SHOWN_PROBLEMS])
        rest = len(problems) - MAX_SHOWN_PROBLEMS
        raise ValueError(f"{title}:\n{shown}" + (f"\n  and {rest} more" if rest > 0 else ""))


class _Reader:
    """Turns JSON values into typed ones and gathers what is wrong; a bad value reads as an empty one."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.leaf_count = 0
        self.sized = False
        self.known: dict[object, LeafSpec] = {}  # a state's leaves occur in every function

    def _say(self, where: str, expected: str, got: Any) -> None:
        text = repr(got)
        self.problems.append(f"{where}: expected {expected}, got {text if len(text) <= 60 else text[:57] + '...'}")

    def _field(self, obj: dict[str, Any], key: str, where: str, kind: type[_T], word: str) -> _T:
        value = obj.get(key)
        if type(value) is kind:
            return value
        if key in obj:
            self._say(f"{where}/{key}", word, value)
        else:
            self.problems.append(f"{where}/{key}: expected {word}, missing")
        return kind()

    def text(self, obj: dict[str, Any], key: str, where: str) -> str:
        value = self._field(obj, key, where, str, "text")
        if key in obj and type(obj[key]) is str and not 1 <= len(value) <= MAX_PATH_LENGTH:
            self._say(f"{where}/{key}", f"1 to {MAX_PATH_LENGTH} characters", value)
        return value

    def count(self, obj: dict[str, Any], key: str, where: str) -> int:
        value = self._field(obj, key, where, int, "an integer")
        if not 0 <= value < 2**63:
            self._say(f"{where}/{key}", "an integer from 0 below 2**63", value)
        return value

    def digest(self, obj: dict[str, Any], key: str, where: str) -> str:
        value = self._field(obj, key, where, str, "a SHA-256")
        if type(obj.get(key)) is str and _SHA256.fullmatch(value) is None:
            self._say(f"{where}/{key}", "64 lowercase hexadecimal digits", value)
        return value

    def mapping(self, obj: dict[str, Any], key: str, where: str) -> dict[str, Any]:
        return self._field(obj, key, where, dict, "an object")

    def sequence(self, obj: dict[str, Any], key: str, where: str) -> list[Any]:
        return self._field(obj, key, where, list, "a list")

    def texts(self, obj: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
        values = self.sequence(obj, key, where)
        for index, value in enumerate(values):
            if type(value) is not str:
                self._say(f"{where}/{key}/{index}", "text", value)
        return tuple(values)

    def objects(self, values: Sequence[Any], where: str, read: Callable[[dict[str, Any], str], _T]) -> list[_T]:
        result = []
        for index, value in enumerate(values):
            if type(value) is dict:
                result.append(read(value, f"{where}/{index}"))
            else:
                self._say(f"{where}/{index}", "an object", value)
        return result

    def only(self, obj: dict[str, Any], known: Sequence[str], where: str) -> None:
        for key in obj:
            if key not in known:
                self.problems.append(f"{where}: unknown key {key!r}, expected {', '.join(known)}")

    def manifest(self, raw: dict[str, Any]) -> Manifest:
        self.fixpoint(self.mapping(raw, "fixpoint", ""))
        sizes = self.sizes(self.mapping(raw, "sizes", "")) if "sizes" in raw else None
        self.sized = sizes is not None
        versions = self.mapping(raw, "versions", "")
        for key in versions:
            self.text(versions, key, "/versions")
        functions = self.mapping(raw, "functions", "")
        members = self.mapping(raw, "members", "")
        return Manifest(
            name=self.text(raw, "name", ""),
            program=self.digest(raw, "program", ""),
            template=self.template(self.mapping(raw, "template", "")),
            functions={name: self.function(functions, name) for name in functions},
            sizes=sizes,
            targets=tuple(self.objects(self.sequence(raw, "targets", ""), "/targets", self.target)),
            members={name: self.member(members, name) for name in members},
            versions=versions,
        )

    def template(self, obj: dict[str, Any]) -> Template:
        self.only(obj, ("state", "batch", "inputs"), "/template")
        return Template(*(self.leaves(obj, role, "/template") for role in ("state", "batch", "inputs")))

    def sizes(self, obj: dict[str, Any]) -> Sizes:
        where = "/sizes"
        self.only(obj, ("symbol", "low", "high", "multiple", "compiled", "axes"), where)
        symbol = self.text(obj, "symbol", where)
        low, high, multiple = (self.count(obj, key, where) for key in ("low", "high", "multiple"))
        compiled = self.sequence(obj, "compiled", where)
        falling = all(type(n) is int for n in compiled) and compiled == sorted(set(compiled), reverse=True)
        if not falling or not compiled or compiled[0] != high or compiled[-1] < low:
            self._say(f"{where}/compiled", f"falling sizes from {high}, none below {low}", compiled)
        if not 1 <= low <= high or not 1 <= multiple <= high:
            self._say(where, "1 <= low <= high and 1 <= multiple <= high", (low, high, multiple))
        axes = self.mapping(obj, "axes", where)
        self.only(axes, _SIZE_ROLES, f"{where}/axes")
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for role in _SIZE_ROLES:
            of_role = self.mapping(axes, role, f"{where}/axes")
            for path, own in of_role.items():
                if type(own) is not list or not own or any(type(n) is not int or not 0 <= n < MAX_RANK for n in own):
                    self._say(f"{where}/axes/{role}/{path}", "a list of axes", own)
                else:
                    found.setdefault(role, {})[path] = tuple(own)
        return Sizes(symbol, low, high, multiple, tuple(compiled), found)

    def leaves(self, obj: dict[str, Any], key: str, where: str) -> tuple[LeafSpec, ...]:
        values = self.sequence(obj, key, where)
        where = f"{where}/{key}"
        self.leaf_count += len(values)
        if self.leaf_count > MAX_LEAVES:
            self.problems.append(f"{where}: more than {MAX_LEAVES} leaves in all")
            return ()
        specs = [spec for spec in self.objects(values, where, self.leaf) if spec is not None]
        seen: set[str] = set()
        for spec in specs:
            if spec.path in seen:
                self.problems.append(f"{where}: the leaf path {spec.path!r} occurs twice")
            seen.add(spec.path)
        return tuple(specs)

    def leaf(self, obj: dict[str, Any], where: str) -> LeafSpec | None:
        identity = _identity(obj)
        if identity in self.known:
            return self.known[identity]
        before = len(self.problems)
        self.only(obj, _LEAF_KEYS, where)
        if "key" not in obj:
            self.problems.append(f"{where}/key: expected null or the name of a PRNG implementation, missing")
        path = self._field(obj, "path", where, str, "text")
        dtype = self._field(obj, "dtype", where, str, "the name of a dtype")
        shape = self.sequence(obj, "shape", where)
        key = obj.get("key")
        if len(path) > MAX_PATH_LENGTH or "\0" in path:
            self._say(f"{where}/path", f"a leaf path of at most {MAX_PATH_LENGTH} characters", path)
        if len(shape) > MAX_RANK or any(type(n) is not int or not 0 <= n < 2**63 for n in shape):
            self._say(f"{where}/shape", f"up to {MAX_RANK} integers from 0 below 2**63", shape)
        if key is not None and (type(key) is not str or not key):
            self._say(f"{where}/key", "null or the name of a PRNG implementation", key)
        if len(self.problems) > before:
            return None
        if _DTYPE.fullmatch(dtype) is None:
            self._say(f"{where}/dtype", "the name of a dtype", dtype)
            return None
        try:
            spec = LeafSpec(path, dtype, tuple(shape), key)
            byte_length = spec.byte_length
        except ValueError as exc:
            self.problems.append(f"{where}/dtype: {exc}")
            return None
        if byte_length >= 2**63:
            self._say(f"{where}/shape", "fewer than 2**63 bytes", shape)
            return None
        if identity is not None:
            self.known[identity] = spec
        return spec

    def function(self, functions: dict[str, Any], name: str) -> Function:
        where = f"/functions/{name}"
        if name not in CONVENTION:
            self.problems.append(f"/functions: unknown function {name!r}, expected {', '.join(CONVENTION)}")
            return Function(name, (), ())
        obj = self.mapping(functions, name, "/functions")
        arguments, results = CONVENTION[name]
        if self.sized and name in _SIZED:
            arguments = (*arguments, "size")
        return Function(
            name, self.groups(obj, "arguments", where, arguments), self.groups(obj, "results", where, results)
        )

    def groups(self, obj: dict[str, Any], key: str, where: str, roles: tuple[str, ...]) -> tuple[Group, ...]:
        values = self.sequence(obj, key, where)
        groups = tuple(self.objects(values, f"{where}/{key}", self.group))
        got = tuple(group.role for group in groups)
        if key in obj and got != roles:
            self.problems.append(
                f"{where}/{key}: expected the roles {', '.join(roles)}, got {', '.join(got) or 'none'}"
            )
        return groups

    def group(self, obj: dict[str, Any], where: str) -> Group:
        self.only(obj, ("role", "leaves"), where)
        return Group(self.text(obj, "role", where), self.leaves(obj, "leaves", where))

    def target(self, obj: dict[str, Any], where: str) -> CompiledTarget:
        return CompiledTarget(
            text=self.text(obj, "text", where),
            module=self.text(obj, "module", where),
            requires=self.mapping(obj, "requires", where),
            flags=self.texts(obj, "flags", where),
        )

    def member(self, members: dict[str, Any], name: str) -> Member:
        where = f"/members/{name}"
        obj = self.mapping(members, name, "/members")
        self.only(obj, ("byte_length", "sha256"), where)
        return Member(self.count(obj, "byte_length", where), self.digest(obj, "sha256", where))

    def fixpoint(self, obj: dict[str, Any]) -> None:
        self.count(obj, "rounds", "/fixpoint")
        self.texts(obj, "notes", "/fixpoint")
        self.objects(self.sequence(obj, "changes", "/fixpoint"), "/fixpoint/changes", self.change)

    def change(self, obj: dict[str, Any], where: str) -> None:
        self._field(obj, "path", where, str, "text")
        self.text(obj, "from", where)
        self.text(obj, "to", where)
        self.count(obj, "round", where)
        self._field(obj, "narrowed", where, bool, "true or false")


def _identity(obj: dict[str, Any]) -> tuple[str, str, tuple[int, ...], str | None] | None:
    """The fields of a leaf whose types are right, to recognise it; None for any other."""
    path, dtype, shape, key = map(obj.get, _LEAF_KEYS)
    if len(obj) != len(_LEAF_KEYS) or "key" not in obj or not (key is None or type(key) is str):
        return None
    if type(path) is not str or type(dtype) is not str or type(shape) is not list:
        return None
    if any(type(n) is not int for n in shape):  # true would pass for 1
        return None
    return path, dtype, tuple(shape), key
