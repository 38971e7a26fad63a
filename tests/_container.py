"""A small artifact, and a second writer of containers, made from docs/artifact.md, that can break its rules too."""

import hashlib
import json
import struct
import zlib


def leaf(path, dtype="float32", shape=(2,), key=None):
    return {"path": path, "dtype": dtype, "shape": list(shape), "key": key}


def group(role, *leaves):
    return {"role": role, "leaves": list(leaves)}


def small_manifest():
    state = (leaf("params/w"), leaf("key", "uint32", (2,), "threefry2x32"))
    sums = (leaf("sum/loss", shape=()), leaf("count", "int32", ()))
    batch, inputs = (leaf("x", shape=(4, 2)),), (leaf("", shape=(4, 2)),)
    return {
        "name": "small",
        "program": "ab" * 32,
        "template": {"state": list(state), "batch": list(batch), "inputs": list(inputs)},
        "functions": {
            "step": {
                "arguments": [group("state", *state), group("accumulators", *sums), group("batch", *batch)],
                "results": [
                    group("state", *state),
                    group("accumulators", *sums),
                    group("metrics", leaf("loss", shape=())),
                ],
            },
            "evaluate": {
                "arguments": [group("state", *state), group("accumulators", *sums), group("batch", *batch)],
                "results": [group("accumulators", *sums), group("metrics", leaf("loss", shape=()))],
            },
            "predict": {
                "arguments": [group("state", *state), group("inputs", *inputs)],
                "results": [group("outputs", leaf("", shape=(4,)))],
            },
            "init": {
                "arguments": [group("seed", leaf("seed/high", "uint32", ()), leaf("seed/low", "uint32", ()))],
                "results": [group("state", *state)],
            },
        },
        "fixpoint": {
            "rounds": 2,
            "changes": [
                {"path": "params/w", "from": "float16[2]", "to": "float32[2]", "round": 1, "narrowed": False},
            ],
            "notes": ["a note"],
        },
        "targets": [{"text": "cpu", "module": "modules/cpu.vmfb", "requires": {"feature": ["a"]}, "flags": ["--x"]}],
        "versions": {"fixstep": "0.1.0", "jax": "0.10.2", "iree": "3.13.0"},
    }


MEMBERS = {"modules/cpu.vmfb": b"module" * 20, "program.mlir": b"module {}\n", "reference/step.jax": b""}


def described(members):
    return {
        name: {"byte_length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sorted(members.items())
    }


def manifest_bytes(manifest=None, members=None):
    members = MEMBERS if members is None else members
    whole = {"format": "fixstep", "version": 1, **(manifest or small_manifest())}
    whole.setdefault("members", described(members))
    return json.dumps(whole).encode()


def comment_of(manifest):
    return b"fixstep manifest sha256 " + hashlib.sha256(manifest).hexdigest().encode()


def container(members, *, comment=None, method=0, flags=0, mode=0o100644, padding=b"\0", end=None, sizes=None, gap=b""):
    """Bytes of a container. `members`: pairs of name (bytes) and data; `end`: replaces fields of the end record."""
    out, central = b"", b""
    for name, data in members:
        packed = data
        if method == 8:
            packer = zlib.compressobj(9, zlib.DEFLATED, -15)
            packed = packer.compress(data) + packer.flush()
        at = len(out)
        fill = -(at + 30 + len(name) + 6) % 64
        extra = struct.pack("<HHH", 0xD935, 2 + fill, 64) + padding * fill
        common = struct.pack(
            "<HHHHHIII", 10, flags, method, 0, 0x21, zlib.crc32(data), *(sizes or (len(packed), len(data)))
        )
        out += b"PK\3\4" + common + struct.pack("<HH", len(name), len(extra)) + name + extra + packed
        central += b"PK\1\2" + struct.pack("<H", 3 << 8 | 20) + common
        central += struct.pack("<HHHHHII", len(name), 0, 0, 0, 0, mode << 16, at) + name
    out += gap
    fields = {"disk": 0, "start": 0, "here": len(members), "count": len(members), "length": len(central)}
    fields = {**fields, "offset": len(out), **(end or {})}
    comment = comment_of(members[0][1]) if comment is None else comment
    return (
        out + central + b"PK\5\6" + struct.pack("<HHHHII", *fields.values()) + struct.pack("<H", len(comment)) + comment
    )


def pairs(manifest=None, members=None):
    """The members of a container, the manifest first."""
    members = MEMBERS if members is None else members
    return [(b"manifest.json", manifest_bytes(manifest, members))] + [
        (name.encode(), data) for name, data in sorted(members.items())
    ]
