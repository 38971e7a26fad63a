"""Changes to what a module asks of its device's queues: one queue, and one piece of work after the other.

IREE 3.13 makes several queues on one Vulkan queue, each with a thread that wakes what waits for work that is done.
What has to be woken is numbered; a number is raised and signalled in two steps, by that thread or by the one that hands
work over. Where two of them are between the steps at once, the lower number is signalled after the higher one, and the
driver declares the device lost (`DATA_LOSS`). So there is never more than one piece of work that may be woken: no
second queue that waits for the first, and no two pieces that wait for one fence.
"""

from __future__ import annotations

import re

_MODULE = re.compile(r"^module( @\S+)?( attributes \{)?", re.MULTILINE)
_OPENED = re.compile(r"^module.*\{$", re.MULTILINE)
_FUNCTION = re.compile(r"  (?:util\.func|util\.initializer)\b")
_FENCE = re.compile(r"(%arg\d+): !hal\.fence")
_BLOCK = re.compile(r"\s*\^bb\d+")
_QUEUED = re.compile(r"^(\s*)(?:%\S+ = )?hal\.device\.queue\.[\w.]+<.* wait\((%[\w#]+)\) signal\((%[\w#]+)\)")
_LEAVES = re.compile(r"^(\s*)(?:cf\.\w+|util\.return)\b")
_NO_FENCE = re.compile(r"^\s*(%[\w#]+) = util\.null : !hal\.fence")


def one_queue(module: str, device: str) -> str:
    """The module with its device named, and everything placed on that device's first queue.

    Args:
        module: the text, its first operation a `module` that opens on one line.
        device: an attribute that makes a device, `#hal.device.alias<"vulkan"> : !hal.device`.
    """
    placed = "stream.affinity.default = #hal.device.affinity<@__device_0, [0]>"

    def with_attribute(found: re.Match[str]) -> str:
        name, others = found.group(1) or "", found.group(2)
        return f"module{name} attributes {{{placed}" + (", " if others else "}")

    attributed = _MODULE.sub(with_attribute, module, count=1)
    return _OPENED.sub(lambda f: f"{f.group()} util.global private @__device_0 = {device}", attributed, count=1)


def one_after_another(code: str) -> str:
    """Work that is handed to a queue waits for what the same function handed over before it.

    What a block began is done when the block is left, so that each begins with nothing under way but what its function
    was called with: the fence that it waits for.

    Args:
        code: the text of IREE's phase `hal`.
    """
    edited: list[str] = []
    first: str | None = None  # the fence that the function waits for
    last: str | None = None  # the fence of what was handed over last
    absent: set[str] = set()
    for number, line in enumerate(code.split("\n")):
        if _FUNCTION.match(line):
            found = _FENCE.search(line)
            first = last = found.group(1) if found else None
            absent = set()
        elif _BLOCK.match(line):
            last = first
        elif found := _NO_FENCE.match(line):
            absent.add(found.group(1))
        elif found := _QUEUED.match(line):
            indent, wait, signal = found.groups()
            if last is not None and wait != last:
                joined = last if wait in absent else f"%edited_{number}"
                if wait not in absent:
                    edited.append(f'{indent}{joined} = hal.fence.join at([{wait}, {last}]) flags("None") -> !hal.fence')
                line = line.replace(f" wait({wait}) ", f" wait({joined}) ", 1)
            last = signal
        elif (found := _LEAVES.match(line)) and last is not None and not last.startswith("%arg"):
            indent, own = found.group(1), f"%edited_{number}"
            edited += [
                f"{indent}{own}_ever = arith.constant -1 : i32",
                f'{indent}{own} = hal.fence.await until([{last}]) timeout_millis({own}_ever) flags("None") : i32',
            ]
        edited.append(line)
    return "\n".join(edited)
