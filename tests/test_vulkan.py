"""Vulkan: devices, read-back, calls that return before the device is done, and what a machine without it is told."""

import os
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from _suite_cases import CASES
from conftest import tiny_batch

from fixstep.frontend import Program, compile
from fixstep.runtime import ArrayData, Loop, TargetError, load
from fixstep.runtime._device import Device
from fixstep.runtime._signature import LeafSpec
from fixstep.targets import parse, vulkan
from fixstep.targets._adapt import (
    round_integers_first,
    select_for_booleans,
    separate_movements,
    separate_narrow_products,
    split_complex_selects,
)
from fixstep.targets._branches import separate_references
from fixstep.targets._queue import one_after_another
from fixstep.targets._spirv import exact_arithmetic
from fixstep.targets.errors import DeviceError

ABSENT = parse("vulkan").unavailable({})
needs_device = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))


@pytest.fixture(scope="module")
def artifact(tiny_program, tmp_path_factory):
    path = tmp_path_factory.mktemp("vulkan") / "tiny.fixstep"
    compile(tiny_program, path, targets=["cpu", "vulkan"], verify=False)
    return path


def fresh_process(code, *arguments, **environment):
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)} | environment
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@needs_device
@pytest.mark.parametrize("memory", ["shared", "separate"])
@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("size", [0, 1, 3, 1023, 70_001])
def test_arrays_come_back_as_they_went(memory, dtype, size):
    device = Device(parse("vulkan").open_device(None, {}, bytes_per_step=0), memory=memory)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    # One byte off every alignment, and read-only.
    bytes_ = np.random.default_rng(0).integers(0, 2, size * kind.itemsize + 1).astype(np.uint8).tobytes()
    array = np.frombuffer(bytes_, kind, count=size, offset=1 if size else 0)
    spec = LeafSpec("x", dtype, (size,))
    for _ in range(2):
        assert device.download(device.upload(array, spec), spec).tobytes() == array.tobytes()
    device.close()


@needs_device
def test_a_device_is_chosen_by_index_or_name(artifact):
    by_index = load(artifact, target="vulkan", device="0")
    by_name = load(artifact, target="vulkan", device="L")  # of llvmpipe, or of a GPU's maker, in any case
    for session in (by_index, by_name):
        assert session.choice.target == "vulkan"
        session.step(tiny_batch())
    with pytest.raises(TargetError, match=r"no device 'nonesuch' of target vulkan; there are: 0: "):
        load(artifact, target="vulkan", device="nonesuch")


@needs_device
def test_a_software_device_is_not_preferred(artifact):
    software = parse("vulkan").preference() < 0
    assert load(artifact).choice.target == ("cpu" if software else "vulkan")


@needs_device
def test_calls_return_before_the_device_is_done_and_keep_their_order(artifact):
    hurried, waited = load(artifact, target="vulkan"), load(artifact, target="vulkan")
    assert hurried._module._lookup("step")[1], "the step takes no fences"
    losses = [hurried.step(tiny_batch(i))["loss"] for i in range(40)]
    expected = [float(waited.step(tiny_batch(i))["loss"]) for i in range(40)]
    assert [float(loss) for loss in losses] == expected
    assert {p: a.tobytes() for p, a in hurried.state().items()} == {p: a.tobytes() for p, a in waited.state().items()}


@needs_device
def test_a_call_that_could_not_be_made_does_not_stop_the_next(artifact):
    session, untroubled = load(artifact, target="vulkan"), load(artifact, target="vulkan")
    for each in (session, untroubled):
        each.step(tiny_batch(1))
    with pytest.raises(DeviceError, match="failed in step"):
        session._module.invoke("step", session._current, wanted=1)
    for each in (session, untroubled):
        each.step(tiny_batch(2))
    assert float(session.averages()["loss"]) == float(untroubled.averages()["loss"])


FAILS_LATER = """
import sys
from conftest import tiny_batch
from fixstep.runtime import DeviceError, load
session = load(sys.argv[1], target="vulkan")
session.step(tiny_batch())
session._device._semaphore.fail("lost")
try:
    session.state()
except DeviceError as exc:
    print(exc)
other = load(sys.argv[1], target="vulkan")
assert other._device._hal is not session._device._hal
other.step(tiny_batch())
print(other.steps)
"""


@needs_device
def test_a_device_that_fails_later_is_told_of_and_the_next_session_opens_another(artifact):
    done = fresh_process(FAILS_LATER, artifact)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"in a call that it had taken: .*lost.*restore the last checkpoint\n1\n$", done.stdout)


CLOSED = """
import gc, os, sys
from conftest import tiny_batch
from fixstep.runtime import load
threads = lambda: len(os.listdir("/proc/self/task"))
load(sys.argv[1], target="vulkan")  # what a driver starts once stays
closed = threads()
first, second = load(sys.argv[1], target="vulkan"), load(sys.argv[1], target="vulkan")
assert threads() > closed
metric = first.step(tiny_batch())["loss"]
del first
assert threads() > closed, "another session has it open"
second.loop = [second]  # found by the garbage collector alone
del second
gc.collect()
assert threads() > closed, "a metric is still to be read"
value = float(metric)
assert threads() == closed
unread = load(sys.argv[1], target="vulkan").step(tiny_batch())["loss"]
assert threads() > closed
del unread
assert threads() == closed
prepared = load(sys.argv[1], target="vulkan").prepare(tiny_batch())
assert threads() > closed
del prepared
assert threads() == closed
at_the_end = load(sys.argv[1], target="vulkan")
kept = at_the_end.step(tiny_batch())
print(value)
"""


@needs_device
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
def test_a_device_closes_with_the_last_that_uses_it(artifact):
    """IREE's threads for a device of Mesa's never rest; left open, they took two cores from all that followed."""
    done = fresh_process(CLOSED, artifact)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) == float(load(artifact, target="vulkan").step(tiny_batch())["loss"])


@needs_device
def test_batches_go_to_the_device_in_the_thread_that_prefetches(artifact, monkeypatch):
    data = {name: np.concatenate([tiny_batch(i)[name] for i in range(6)]) for name in tiny_batch()}
    expected = load(artifact, target="vulkan")
    Loop(expected).run(ArrayData(data, 8), epochs=2)
    session, threads = load(artifact, target="vulkan"), []
    upload = session._upload

    def recorded(arrays, specs):
        threads.append(threading.current_thread().name)
        return upload(arrays, specs)

    monkeypatch.setattr(session, "_upload", recorded)
    Loop(session).run(ArrayData(data, 8), epochs=2, prefetch=2)
    assert threads == ["fixstep-prefetch"] * 12
    assert {p: a.tobytes() for p, a in session.state().items()} == {p: a.tobytes() for p, a in expected.state().items()}


@needs_device
@pytest.mark.parametrize("case", ["while_loop", "cholesky"])
def test_loops_keep_the_device(case, tmp_path):
    """Several submissions a round: with two queues, about one session in ten lost the device."""
    init, step, batches = CASES[case].build()
    compile(
        Program(init=init, step=step, batch=batches[0], name=case), tmp_path / "a", targets=["vulkan"], verify=False
    )
    for _ in range(10):
        session = load(tmp_path / "a", target="vulkan")
        for _ in range(20):
            session.step(batches[0])
        session.state()


@needs_device
@pytest.mark.parametrize(("dtype", "guarded"), [("int8", True), ("bool", True), ("bfloat16", True), ("int8", False)])
def test_narrow_arrays_in_a_sum_of_products(dtype, guarded, tmp_path, monkeypatch):
    """Without the guard it fails when IREE is mended: then the guard can go."""
    if not guarded:
        monkeypatch.setattr(vulkan, "separate_movements", lambda module: module)
    rng = np.random.default_rng(0)
    state = {"q": rng.integers(0, 2, (16, 8)).astype(getattr(ml_dtypes, dtype, dtype))}
    batch = rng.standard_normal((16, 8)).astype(np.float32)
    program = Program(
        init=state,
        step=lambda state, batch: (state, {"y": (state["q"].astype(jnp.float32) * batch).sum(0)}),
        batch=batch,
    )
    compile(program, tmp_path / "a.fixstep", targets=["vulkan"], verify=False)
    wanted = (state["q"].astype(np.float32) * batch).sum(0)
    session = load(tmp_path / "a.fixstep")
    right = [np.allclose(session.step(batch)["y"].numpy(), wanted, atol=1e-5) for _ in range(3)]
    assert all(right) == guarded


@needs_device
def test_the_process_ends_well_whatever_is_still_held(artifact):
    done = fresh_process(
        "import numpy as np\n"
        "from fixstep.runtime import load\n"
        f"session = load({str(artifact)!r}, target='vulkan')\n"
        "metric = session.step({'x': np.ones((8, 4), 'f4'), 'y': np.ones((8, 3), 'f4')})['loss']\n"
        "float(metric); device, module = session._device, session._module\n"
        "view = session._current; del session\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_machine_without_a_driver_is_told_why(artifact):
    done = fresh_process(
        "from fixstep.runtime import load\n"
        f"print(load({str(artifact)!r}).choice)\n"
        f"load({str(artifact)!r}, target='vulkan')\n",
        VK_DRIVER_FILES="/nonexistent",
        VK_ICD_FILENAMES="/nonexistent",
    )
    assert "target='cpu'" in done.stdout
    assert "TargetError" in done.stderr
    assert "finds no driver" in done.stderr or "no Vulkan loader" in done.stderr


def test_a_machine_without_a_loader_is_told_why():
    text = "Error creating driver: libvulkan.c:641: NOT_FOUND; Vulkan loader library not found; ensure it is installed"
    assert vulkan._why_none(text) == "there is no Vulkan loader (Debian: libvulkan1)"


def test_a_type_that_the_driver_lacks_is_refused_when_loading():
    needs = parse("vulkan").requirements("", "tensor<3xf32> tensor<f16> tensor<2x2xcomplex<f32>> tensor<?xi1>")
    assert needs == {"types": ["f16", "f32", "i1"], "longest_loop": 0}
    device = vulkan._Device(0, 1, "Small", software=False, features=frozenset({"storageBuffer16BitAccess"}))
    assert vulkan._lacks(device, needs) == (
        "Small lacks storageBuffer8BitAccess (for i1), shaderInt8 (for i1), shaderFloat16 (for f16)"
    )
    assert vulkan._lacks(device, {"types": ["f32"], "longest_loop": 10**6}) is None


@pytest.mark.parametrize(
    ("line", "elements"),
    [
        ("%1 = stablehlo.reduce(%0 init: %z) applies stablehlo.add across dimensions = [0] : "
         "(tensor<70000x3xf32>, tensor<f32>) -> tensor<3xf32>", 70_000),
        ("%1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : "
         "(tensor<4x70000xf32>, tensor<70000x3xf32>) -> tensor<4x3xf32>", 70_000),
    ],
)  # fmt: skip
def test_a_loop_that_a_software_device_would_cut_short_is_refused(line, elements):
    needs = parse("vulkan").requirements("", line)
    assert needs["longest_loop"] == elements
    device = vulkan._Device(0, 1, "llvmpipe", software=True, features=frozenset())
    assert f"llvmpipe ends loops after 65535 rounds, and the program reduces {elements}" in str(
        vulkan._lacks(device, needs)
    )


@pytest.mark.parametrize("option", ["", "RDNA3", "rdna3;x", "gpu name"])
def test_an_option_that_is_no_name_is_refused(option):
    with pytest.raises(TargetError, match=r"expected vulkan, or vulkan:<GPU>|nothing after the colon"):
        parse(f"vulkan:{option}")


@pytest.mark.parametrize("option", ["rdna3", "ampere", "adreno", "valhall4"])
def test_code_for_a_kind_of_gpu_is_compiled(option, tiny_program, tmp_path):
    compile(tiny_program, tmp_path / "a.fixstep", targets=[f"vulkan:{option}"], verify=False)


def test_an_unknown_gpu_is_named(tiny_program, tmp_path):
    with pytest.raises(TargetError, match="does not know target 'vulkan:nonesuch'"):
        compile(tiny_program, tmp_path / "a.fixstep", targets=["vulkan:nonesuch"], verify=False)


def test_adapted_text_keeps_its_lines():
    text = (
        "  %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : "
        "(tensor<4x4xbf16>, tensor<4x4xbf16>) -> tensor<4x4xf32>\n"
        "  %1 = stablehlo.select %c, %a#0, %b : tensor<i1>, tensor<3xcomplex<f32>>\n  return %0"
    )
    adapted = split_complex_selects(separate_narrow_products(text))
    assert adapted.count("\n") == text.count("\n")
    assert "tensor<4x4xbf16>, tensor<4x4xbf16>) ->" not in adapted
    assert "stablehlo.select %c, %adapted_1_real_yes" in adapted
    assert split_complex_selects(separate_narrow_products("%0 = stablehlo.dot_general %a")) == (
        "%0 = stablehlo.dot_general %a"
    )


def test_an_integer_is_rounded_before_it_is_narrow():
    line = "  %3 = stablehlo.convert %2 : (tensor<4x8xui32>) -> tensor<4x8xbf16>"
    adapted = round_integers_first(line)
    assert "reduce_precision %adapted_3_wide, format = e8m7 : tensor<4x8xf32>" in adapted
    assert adapted.endswith("(tensor<4x8xf32>) -> tensor<4x8xbf16>")
    other = line.replace("ui32", "f32")
    assert round_integers_first(other) == other


BUFFER, FENCE = "!vm.ref<!hal.buffer>", "!vm.ref<!hal.fence>"


def test_a_branch_hands_on_every_reference_once():
    one, other = f"^bb2(%r, %r, %2, %r : {BUFFER}, {BUFFER}, i32, {BUFFER})", f"^bb3(%r, %f : {BUFFER}, {FENCE})"
    branch = f"      vm.cond_br %1, {one}, {other}"
    *selections, edited = separate_references(branch).split("\n")
    assert re.findall(r"(%\w+) = vm.select.ref %\w+, %r,", "".join(selections)) == ["%edited_0_0", "%edited_0_1"]
    assert "^bb2(%r, %edited_0_0, %2, %edited_0_1 : " in edited
    assert "^bb3(%r, %f : " in edited


def test_a_branch_hands_on_no_reference_that_is_used_behind_it():
    code = f"""\
    vm.func private @one(%used: {BUFFER}, %discarded: {BUFFER}) {{
      %before = vm.call @f(%discarded) : ({BUFFER}) -> {BUFFER}
      vm.cond_br %1, ^bb1(%used : {BUFFER}), ^bb2(%discarded, %before : {BUFFER}, {BUFFER})
    ^bb1(%2: {BUFFER}):  // pred: ^bb0
      %3 = vm.call @f(%used, %2) : ({BUFFER}, {BUFFER}) -> i32
      vm.return %3 : i32
    ^bb2(%4: {BUFFER}, %5: {BUFFER}):  // pred: ^bb0
      vm.discard.refs %discarded : {BUFFER}
      vm.return %1 : i32
    }}
    vm.func private @another() {{
      %6 = vm.call @f(%before, %discarded) : ({BUFFER}, {BUFFER}) -> i32"""
    edited = separate_references(code)
    assert re.findall(r"= vm.select.ref %\w+, (%\w+),", edited) == ["%used"]
    assert f"^bb1(%edited_2_0 : {BUFFER}), ^bb2(%discarded, %before : " in edited


def test_work_for_a_queue_is_done_in_one_order():
    code = """\
  util.func public @step$async(%arg0: !hal.buffer_view, %arg1: !hal.fence, %arg2: !hal.fence) {
    %none = util.null : !hal.fence
    %a = hal.device.queue.alloca<%d> affinity(%c) wait(%arg1) signal(%f0) : !hal.buffer
    hal.device.queue.alloca<%d> affinity(%c) wait(%arg1) signal(%f1) : !hal.buffer
    hal.device.queue.execute<%d> affinity(%c) wait(%f1) signal(%f2) commands([%1])
    cf.cond_br %2, ^bb1, ^bb2
  ^bb1:  // pred: ^bb0
    hal.device.queue.dealloca<%d> affinity(%c) wait(%none) signal(%arg2) : !hal.buffer
    util.return %a : !hal.buffer
  }"""
    edited = one_after_another(code).split("\n")
    assert [line for line in edited if "queue." in line or "fence." in line] == [
        "    %a = hal.device.queue.alloca<%d> affinity(%c) wait(%arg1) signal(%f0) : !hal.buffer",
        '    %edited_3 = hal.fence.join at([%arg1, %f0]) flags("None") -> !hal.fence',
        "    hal.device.queue.alloca<%d> affinity(%c) wait(%edited_3) signal(%f1) : !hal.buffer",
        "    hal.device.queue.execute<%d> affinity(%c) wait(%f1) signal(%f2) commands([%1])",
        '    %edited_5 = hal.fence.await until([%f2]) timeout_millis(%edited_5_ever) flags("None") : i32',
        "    hal.device.queue.dealloca<%d> affinity(%c) wait(%arg1) signal(%arg2) : !hal.buffer",
    ]


@needs_device
def test_sessions_that_share_a_device_take_turns(artifact):
    """Neither waits for its own calls; each has the numbers that it has alone."""
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.standard_normal((8, 4)).astype("float32"), "y": rng.standard_normal((8, 3)).astype("float32")}
        for _ in range(20)
    ]
    alone, one, other = (load(artifact, target="vulkan", seed=3) for _ in range(3))
    for batch in batches:
        alone.step(batch)
    for batch in batches:
        one.step(batch)
        other.step(batch)
    expected = {path: leaf.tobytes() for path, leaf in alone.state().items()}
    for session in (one, other):
        assert {path: leaf.tobytes() for path, leaf in session.state().items()} == expected


def test_a_boolean_selects():
    line = "  %3 = stablehlo.convert %2#1 : (tensor<4x8xi1>) -> tensor<4x8xf32>"
    adapted = select_for_booleans(line)
    assert "%adapted_3_0 = stablehlo.constant dense<0.0> : tensor<4x8xf32>" in adapted
    assert "stablehlo.select %2#1, %adapted_3_1, %adapted_3_0 : tensor<4x8xi1>, tensor<4x8xf32>" in adapted
    other = line.replace("xf32", "xi32")
    assert select_for_booleans(other) == other


def test_a_transposed_value_stands_alone():
    line = "  %3 = stablehlo.transpose %2, dims = [1, 0] : (tensor<4x8xf32>) -> tensor<8x4xf32>"
    assert separate_movements(line) == (
        "  %adapted_3 = stablehlo.optimization_barrier %2 : tensor<4x8xf32> "
        "%3 = stablehlo.transpose %adapted_3, dims = [1, 0] : (tensor<4x8xf32>) -> tensor<8x4xf32>"
    )
    argument = line.replace("%2", "%arg2")
    assert separate_movements(argument) == argument


def test_code_keeps_its_arithmetic():
    code = "\n".join(
        [
            "    %cst = spirv.Constant 0.000000e+00 : f32",
            "    %cst_0 = spirv.Constant dense<-0.000000e+00> : vector<4xf32>",
            "    %1 = spirv.FSub %0, %0 : f32",
            "    %2 = spirv.FNegate %1 : f32",
            "    %3 = spirv.FMul %cst, %2 : f32",
            "    %5 = spirv.FDiv %cst_0, %4 : vector<4xf32>",
            "    %cst = spirv.Constant 2.000000e+00 : f32",
            "    %6 = spirv.FMul %3, %cst : f32",
        ]
    )
    exact = exact_arithmetic(code).split("\n")
    assert exact[:2] == code.split("\n")[:2]
    assert exact[2:4] == [
        "    %1 = spirv.FSub %0, %0 {no_contraction} : f32",
        "    %2 = spirv.FNegate %1 {no_contraction} : f32",
    ]
    assert exact[4].endswith("%3 = spirv.FMul %edited_zero_3, %2 {no_contraction} : f32")
    assert "%edited_one_5 = spirv.Constant dense<1.0> : vector<4xf32>" in exact[5]
    assert exact[7] == "    %6 = spirv.FMul %3, %cst {no_contraction} : f32"


@needs_device
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "bare"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_driver_does_not_rearrange_arithmetic(dtype, guarded, tmp_path, monkeypatch):
    """`bare` fails when IREE decorates its code, or on a driver that rearranges nothing: then the guard can go."""
    if not guarded:
        monkeypatch.setattr(vulkan.Vulkan, "code_edits", lambda self, module: ())
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -3.0, 1e-3], dtype)
    program = Program(
        init={"x": np.zeros((4, 8), dtype)},
        step=lambda state, batch: (
            {"x": jnp.stack([batch["x"] - batch["x"], batch["x"] * 0.0, batch["x"] * -0.0, 0.0 / batch["x"]])},
            {},
        ),
        batch={"x": x},
    )
    with jax.enable_x64(dtype == "float64"):
        compile(program, tmp_path / "a.fixstep", targets=["vulkan"], verify=False)
    session = load(tmp_path / "a.fixstep", target="vulkan")
    session.step({"x": x})
    with np.errstate(all="ignore"):
        expected = np.stack([x - x, x * np.full_like(x, 0.0), x * np.full_like(x, -0.0), np.full_like(x, 0.0) / x])
    got = session.state()["x"]
    right = np.array_equal(got, expected, equal_nan=True) and np.array_equal(
        np.signbit(got) & ~np.isnan(got), np.signbit(expected) & ~np.isnan(expected)
    )
    assert right == guarded


def repeated(x):
    return x - x.sum(0)


def transposed(x):
    a, c = x[:, :8], jnp.full((8, 8), 1 / 64, x.dtype)
    return (c.T @ (a @ a)).T + ((c @ a.T).T @ a).T + (c @ a.T) @ a.T


@needs_device
@pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "bare"])
@pytest.mark.parametrize("moved", [repeated, transposed])
def test_what_threads_share_is_seen_by_all(moved, guarded, tmp_path, monkeypatch):
    """`bare` fails when IREE is mended: then the guard can go."""
    if not guarded:
        monkeypatch.setattr(vulkan, "separate_movements", lambda module: module)
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    expected = moved(jnp.asarray(x))
    program = Program(
        init={"x": np.zeros(expected.shape, np.float32)},
        step=lambda state, batch: ({"x": moved(batch["x"])}, {}),
        batch={"x": x},
    )
    compile(program, tmp_path / "a.fixstep", targets=["vulkan"], verify=False)
    session = load(tmp_path / "a.fixstep")
    session.step({"x": x})
    assert np.allclose(session.state()["x"], expected, atol=1e-5) == guarded
