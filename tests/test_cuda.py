"""CUDA, as far as a machine without a GPU can tell: the flags, the PTX, and what `load` says."""

import shutil
import subprocess

import pytest
from _suite_cases import CASES
from iree.compiler.tools import binaries

from fixstep.frontend import Program, compile, infer_template
from fixstep.frontend._lower import lower
from fixstep.runtime import TargetError, load
from fixstep.targets import cuda, parse
from fixstep.targets._adapt import separate_scatters

PTXAS = shutil.which("ptxas") or shutil.which("/usr/local/cuda/bin/ptxas")
ABSENT = parse("cuda").unavailable({})


@pytest.mark.parametrize(
    ("text", "architecture"),
    [
        *[("cuda", "sm_80"), ("cuda:sm_86", "sm_86"), ("cuda:sm_89", "sm_89"), ("cuda:ampere", "ampere")],
        *[(f"cuda:{newer}", "sm_89") for newer in ("sm_90", "sm_90a", "sm_100", "sm_120")],
    ],
)
def test_newer_devices_get_ptx_of_the_newest_that_the_compiler_knows(text, architecture):
    target = parse(text)
    assert target.text == text
    assert f"--iree-cuda-target={architecture}" in target.compile_flags()


def test_an_option_that_is_no_name_is_refused():
    with pytest.raises(TargetError, match=r"unknown target 'cuda:8\.0': expected cuda, cuda:sm_<N>"):
        parse("cuda:8.0")


def test_an_unknown_gpu_is_named(tiny_program, tmp_path):
    with pytest.raises(TargetError, match="does not know target 'cuda:nonesuch'"):
        compile(tiny_program, tmp_path / "a.fixstep", targets=["cuda:nonesuch"], verify=False)


def test_an_older_gpu_is_refused():
    gpu = cuda._Gpu(0, 1, "Old", 75)
    assert cuda._too_old(gpu, {"compute_capability": 80}) == (
        "Old is sm_75, and the code is for sm_80; compile for cuda:sm_75"
    )
    assert cuda._too_old(gpu, {"compute_capability": 75}) is None


@pytest.mark.parametrize(
    ("described", "capability"),
    [
        ("\n- gpu-compute-capability: 8.0\n- gpu-arch-name: sm_80", 80),
        ("- gpu-compute-capability: 12.1", 121),
        ("- gpu-name: an sm_70 by name", None),
    ],
)
def test_the_capability_is_what_iree_prints(described, capability):
    assert cuda._capability(described) == capability


@pytest.mark.skipif(ABSENT is None, reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_why(tiny_program, tmp_path):
    compile(tiny_program, tmp_path / "a.fixstep", targets=["cuda"], verify=False)
    with pytest.raises(TargetError, match=r"no target of the artifact runs on this machine:\n  cuda: .*CUDA"):
        load(tmp_path / "a.fixstep")


def test_a_scatter_stands_alone():
    text = (
        '  %5:2 = "stablehlo.scatter"(%1, %c, %4#1) <{indices_are_sorted = false}> ({\n'
        "  ^bb0(%arg0: tensor<f32>):\n    stablehlo.return %arg0 : tensor<f32>\n"
        "  }) : (tensor<4x2xf32>, tensor<3x1xi32>, tensor<3xf32>) -> tensor<4x2xf32>"
    )
    adapted = separate_scatters(text).split("\n")
    assert adapted[1:] == text.split("\n")[1:]
    assert adapted[0].startswith(
        "  %adapted_5:3 = stablehlo.optimization_barrier %1, %c, %4#1 : "
        "tensor<4x2xf32>, tensor<3x1xi32>, tensor<3xf32> %5:2 = "
    )
    assert '"stablehlo.scatter"(%adapted_5#0, %adapted_5#1, %adapted_5#2) <{' in adapted[0]


@pytest.mark.skipif(PTXAS is None, reason="there is no ptxas on this machine")
@pytest.mark.parametrize("name", ["adam", "causal_attention", "normal_numbers", "type_bfloat16", "sorting", "segments"])
def test_the_ptx_assembles_for_its_own_gpu_and_newer_ones(name, tmp_path):
    init, step, batches = CASES[name].build()
    target = parse("cuda")
    lowered = lower(infer_template(Program(init=init, step=step, batch=batches[0])))
    text = target.adapt(lowered.text).encode()
    tool = binaries.find_tool("iree-compile")
    flags = ["--iree-input-type=stablehlo", *target.compile_flags()]
    dump = f"--iree-hal-dump-executable-binaries-to={tmp_path}"
    subprocess.run(
        [tool, "-", *flags, dump, "-o", str(tmp_path / "a.vmfb")], input=text, check=True, capture_output=True
    )
    files = list(tmp_path.glob("*.ptx"))
    assert files, "the compiler kept no PTX"
    for file in files:
        for architecture in ("sm_80", "sm_90", "sm_120"):
            command = [PTXAS, f"-arch={architecture}", str(file), "-o", "/dev/null"]
            done = subprocess.run(command, capture_output=True, check=False)
            assert done.returncode == 0, (architecture, done.stderr.decode()[:500])
