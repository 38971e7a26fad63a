"""The names that callers rely on."""

import importlib.metadata
import re
from pathlib import Path

import pytest

import fixstep.frontend
import fixstep.runtime

ROOT = Path(__file__).resolve().parent.parent


def test_the_runtime_offers_these_names():
    expected = {
        "load",
        "Loop",
        "Session",
        "Artifact",
        "Progress",
        "Checkpoints",
        "MetricsLog",
        "On",
        "every",
        "EarlyStop",
    }
    assert expected <= set(fixstep.runtime.__all__)
    for name in fixstep.runtime.__all__:
        assert getattr(fixstep.runtime, name).__doc__, name


def test_the_frontend_offers_these_names():
    assert {"Program", "trainer", "infer_template", "compile", "verify_artifact"} <= set(fixstep.frontend.__all__)
    for name in fixstep.frontend.__all__:
        assert getattr(fixstep.frontend, name).__doc__, name


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("TemplateError", ValueError),
        ("FixpointError", TypeError),
        ("ArtifactError", ValueError),
        ("CheckpointError", ValueError),
        ("TargetError", ValueError),
        ("ProgramError", ValueError),
        ("DataError", ValueError),
        ("CompileError", RuntimeError),
        ("DeviceError", RuntimeError),
        ("MismatchError", ArithmeticError),
        ("NonFiniteError", ArithmeticError),
    ],
)
def test_errors_derive_from_what_callers_expect(name, builtin):
    error = getattr(fixstep.runtime, name)
    assert issubclass(error, fixstep.runtime.FixstepError)
    assert issubclass(error, builtin)


def test_the_changelog_names_the_version():
    version = importlib.metadata.version("fixstep")
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_dependencies_point_one_way():
    def imports(folder):
        for file in (ROOT / folder).rglob("*.py"):
            for name in re.findall(
                r"^\s*(?:from|import) (fixstep\.\w+|jax|iree\.compiler)", file.read_text(), re.MULTILINE
            ):
                yield name, file.name

    assert not [found for found in imports("targets") if found[0] != "fixstep.targets"]
    assert not [found for found in imports("runtime") if found[0] not in ("fixstep.targets", "fixstep.runtime")]


def test_target_names_stay_in_their_folder():
    """Code outside of targets/ does not ask which target it has."""
    for folder in ("runtime", "frontend"):
        for file in (ROOT / folder).rglob("*.py"):
            code = file.read_text()
            assert not re.search(r"[\"'](vulkan|cuda|local-task|local-sync|llvm-cpu)[\"']", code), file
