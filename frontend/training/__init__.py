"""From a model, a loss and an optimizer to a program: what `trainer` builds a training step of."""

from fixstep.frontend.training import metrics
from fixstep.frontend.training._precision import Precision
from fixstep.frontend.training._scale import DynamicScale
from fixstep.frontend.training._trainer import trainer
from fixstep.frontend.training._update import Optimizer

__all__ = ["DynamicScale", "Optimizer", "Precision", "metrics", "trainer"]
