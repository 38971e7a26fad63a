"""From a Python training step to an artifact: needs JAX and the IREE compiler (`pip install 'fixstep[compile]'`)."""

from fixstep.frontend._bench import Timing, bench_artifact
from fixstep.frontend._compile import Compiled, compile
from fixstep.frontend._fixpoint import Change
from fixstep.frontend._program import Program, import_program
from fixstep.frontend._template import Template, infer_template
from fixstep.frontend._verify import LeafResult, Verification, verify_artifact
from fixstep.frontend.training import DynamicScale, Precision, metrics, trainer

__all__ = [
    "Change",
    "Compiled",
    "DynamicScale",
    "LeafResult",
    "Precision",
    "Program",
    "Template",
    "Timing",
    "Verification",
    "bench_artifact",
    "compile",
    "import_program",
    "infer_template",
    "metrics",
    "trainer",
    "verify_artifact",
]
