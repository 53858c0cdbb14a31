# The public names, once: type checkers and editors read this file, and so does __init__.py.
from . import addons as addons
from . import checkpoint as checkpoint
from . import kernels as kernels
from .adapters.head import LinearCrossEntropy as LinearCrossEntropy
from .checkpoint.signals import Preempted as Preempted
from .data.mixing import mix as mix
from .data.packing import pack as pack
from .layers.remat import remat as remat
from .memory.errors import OutOfMemoryError as OutOfMemoryError
from .memory.plan import Plan as Plan
from .memory.summary import Summary as Summary
from .planning import plan as plan
from .step.guards import NonFiniteError as NonFiniteError
from .step.loss_scale import DynamicLossScale as DynamicLossScale
from .step.loss_scale import NoLossScale as NoLossScale
from .step.loss_scale import StaticLossScale as StaticLossScale
from .step.train_step import StepResult as StepResult
from .step.train_step import TrainStep as TrainStep
from .trainer import Trainer as Trainer
from .training.throughput import Throughput as Throughput
from .transformer import gpt as gpt  # a module called gpt would take the function's place

__version__: str
