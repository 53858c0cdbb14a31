"""Private names of TensorFlow, Keras and tf_keras, and the places where each release keeps them.

No other module knows such names. Releases move or drop them. So each is looked up where it is first
used, at each of its places in turn, the newest first. The import of fastaccum needs none: a module
that uses one as it is imported asks `has` before. A name that is missing turns off the feature that
needs it: `MissingName` is raised where that feature is used. A public name is used wherever there
is one.

`python -m fastaccum.kernels.private` prints the names that the installed releases lack, and what is
off without them.
"""

from __future__ import annotations

import functools
import importlib
import operator
from typing import Any, NamedTuple

_REQUIRED: Any = object()  # stands for "no default"


class MissingName(RuntimeError):
    """Raised where the installed TensorFlow or Keras lacks a private name that a feature needs."""


class Place(NamedTuple):
    """A private module, class or function of another package, or a whole private module."""

    places: tuple[str, ...]  # "module:name", or "module" for the module itself; the newest first
    serves: str  # what it is used for
    without: str  # what is off, or slower, without it

    def find(self) -> Any:
        """Returns the object at the first place that has it, or None."""
        for place in self.places:
            module_name, _, path = place.partition(":")
            try:
                module = importlib.import_module(module_name)
                if not path:
                    return module
                return operator.attrgetter(path)(module)
            except (ImportError, AttributeError):
                continue
        return None


class Attribute:
    """A private attribute of other packages' objects.

    Called with an object, it reads the attribute.

    >>> slots = Attribute("_slots", of="tf_keras optimizers", serves="slots by weight")
    >>> slots(object(), None) is None
    True
    """

    def __init__(self, name: str, *, of: str, serves: str):
        self.name = name
        self.of = of
        self.serves = serves

    def __call__(self, owner: Any, default: Any = _REQUIRED) -> Any:
        """Returns the owner's attribute, or the default; raises MissingName if there is neither."""
        value = getattr(owner, self.name, default)
        if value is _REQUIRED:
            self._raise_missing(owner)
        return value

    def set(self, owner: Any, value: Any) -> None:
        """Assigns the attribute."""
        setattr(owner, self.name, value)

    def exists(self, owner: Any) -> bool:
        """Tells if the owner has the attribute."""
        return hasattr(owner, self.name)

    def _raise_missing(self, owner: Any) -> None:
        versions = " and ".join(f"{name} {_version(name)}" for name in ("tensorflow", "keras"))
        raise MissingName(
            f"{type(owner).__name__} has no {self.name}, which is needed for: {self.serves}. "
            f"This release of fastaccum does not know where {versions} keep it: install versions "
            "that pyproject.toml allows."
        )


class Method(Attribute):
    """A private method of other packages' objects.

    Called with an object and arguments, it calls the method.
    """

    def __call__(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(owner, self.name, _REQUIRED)
        if method is _REQUIRED:
            self._raise_missing(owner)
        return method(*args, **kwargs)


# Modules, classes and functions, which `private.NAME` returns.

PLACES: dict[str, Place] = {
    "xla": Place(
        ("tensorflow.compiler.tf2xla.python.xla",),
        "writing in place, calls of cuDNN, and barriers that keep XLA from merging what is to "
        "stay apart",
        "no program is compiled by XLA",
    ),
    "hlo_pb2": Place(
        ("tensorflow.compiler.xla.service.hlo_pb2",),
        "reading XLA's plan of a program's memory",
        "memory_analysis, plan and batch_size='auto'",
    ),
    "ag_ctx": Place(
        ("tensorflow.python.autograph.core.ag_ctx",),
        "AutoGraph in the user's loss function, and in nothing else",
        "if and for over tensors in a TrainStep's loss function",
    ),
    "autograph": Place(
        ("tensorflow.python.autograph.impl.api",),
        "AutoGraph in the user's loss function, and in nothing else",
        "if and for over tensors in a TrainStep's loss function",
    ),
    "distribute_lib": Place(
        ("tensorflow.python.distribute.distribute_lib",),
        "leaving a strategy's scope",
        "training under tf.distribute",
    ),
    "distributed_values": Place(
        ("tensorflow.python.distribute.values",),
        "telling distributed variables, and giving each replica its tensor",
        "training under tf.distribute",
    ),
    "framework_ops": Place(
        ("tensorflow.python.framework.ops",),
        "leaving a strategy's scope",
        "training under tf.distribute",
    ),
    "try_evaluate_constant": Place(
        ("tensorflow.python.framework.tensor_util:try_evaluate_constant",),
        "reading which positions a model looks up in packed rows",
        "positions that a model makes otherwise than by keras.ops.arange(length)",
    ),
    "context": Place(
        ("tensorflow.python.eager.context",),
        "reading a program's XLA; telling other workers of an error; calling a program with little "
        "Python",
        "reading a program's XLA, and training on several workers",
    ),
    "InterpolateRuntimeError": Place(
        ("tensorflow.python.eager.polymorphic_function.atomic_function:InterpolateRuntimeError",),
        "naming the layer in an error of a program that is called with little Python",
        "nothing but speed: a train step takes some 10 microseconds more of Python",
    ),
    "lift_to_graph": Place(
        ("tensorflow.python.eager.lift_to_graph:lift_to_graph",),
        "evaluating the part of a graph that makes an attention mask",
        "fused attention under a mask that is a tensor: it takes the layer's own formula",
    ),
    "UnliftableError": Place(
        ("tensorflow.python.eager.lift_to_graph:UnliftableError",),
        "evaluating the part of a graph that makes an attention mask",
        "fused attention under a mask that is a tensor: it takes the layer's own formula",
    ),
    "record": Place(
        ("tensorflow.python.eager.record",),
        "asking if a gradient tape is recording; keeping an eager one from recording a loop",
        "kernels' own gradients: attention, cross-entropy, LayerStack and rematerialisation",
    ),
    "is_op_determinism_enabled": Place(
        ("tensorflow.python.framework.config:is_op_determinism_enabled",),
        "computing the same bits again on a GPU where op determinism is on",
        "nothing: a draw of random numbers that op determinism refuses is tried instead",
    ),
    "gradient_registry": Place(
        ("tensorflow.python.framework.ops:gradient_registry",),
        "freeing a custom gradient with its graph, which TensorFlow keeps for good",
        "that memory: each trained model keeps 3 MB",
    ),
    "get_read_write_resource_inputs": Place(
        ("tensorflow.python.framework.auto_control_deps_utils:get_read_write_resource_inputs",),
        "finding the variables that a forward pass assigns",
        "training models with running statistics",
    ),
    "auto_control_deps": Place(
        ("tensorflow.python.framework.auto_control_deps",),
        "the operations that TensorFlow runs in any order",
        "two micro-batches at a time, without XLA",
    ),
    "control_flow_util": Place(
        ("tensorflow.python.ops.control_flow_util",),
        "asking if XLA compiles what is being traced",
        "every kernel",
    ),
    "random_ops_util": Place(
        ("tensorflow.python.ops.random_ops_util",),
        "deriving the key of a random draw once, and not for each number",
        "nothing but speed: the numbers stay the same, and Dropout is slow on a CPU",
    ),
    "UninitializedVariable": Place(
        ("tensorflow.python.ops.resource_variable_ops:UninitializedVariable",),
        "a slot that another worker has: shape and name, without memory",
        "shard_optimizer=True on several workers",
    ),
    "get_eager_safe_handle_data": Place(
        ("tensorflow.python.ops.resource_variable_ops:get_eager_safe_handle_data",),
        "shape and dtype of the variable behind a handle",
        "training under tf.distribute, and plans of memory",
    ),
    "pywrap_util_port": Place(
        ("tensorflow.python.util._pywrap_util_port",),
        "asking if TensorFlow's operations use oneDNN",
        "the choice of jit_compile='auto' by oneDNN: it chooses as without",
    ),
    "AutocastScope": Place(
        ("keras.src.backend.common.variables:AutocastScope", "keras.src.backend:AutocastScope"),
        "reading a float32 variable in float32 in a layer that computes in half precision",
        "fp32_weight_gradients under half precision, and LayerStack",
    ),
    # Its `dot_product_attention` is what all layers call. Wrapping
    # `keras.ops.dot_product_attention` instead would leave out layers that hold the function
    # itself.
    "nn": Place(
        ("keras.src.backend.ops.nn", "keras.src.backend:ops.nn", "keras.src.backend.tensorflow.nn"),
        "replacing the formula of attention by a fused one",
        "fused attention in layers of Keras and KerasHub: they take their own formula",
    ),
    "CompileMetrics": Place(
        ("keras.src.trainers.compile_utils:CompileMetrics",),
        "choosing a metric by its name and the targets' shapes, as `compile` does",
        "metrics",
    ),
    "get_loss": Place(
        ("keras.src.trainers.compile_utils:get_loss",),
        "choosing a loss by its name and the targets' shapes, as `compile` does",
        "losses by name",
    ),
    "data_adapters": Place(
        ("keras.src.trainers.data_adapters",),
        "PyDatasets, generators and PyTorch's loaders as tf.data",
        "data other than arrays and tf.data",
    ),
    "DotNotTrackScope": Place(
        ("keras.src.utils.tracking:DotNotTrackScope",),
        "giving a model its compiled metrics without tracking them",
        "metrics in a model that a callback saves",
    ),
    # What tensorflow-addons 0.23 imports by the names of Keras 2; neither package is developed any
    # further.
    "tf_keras_backend": Place(
        ("tf_keras.src.backend",), "importing tensorflow-addons", "fastaccum.addons"
    ),
    "tf_keras_tf_utils": Place(
        ("tf_keras.src.utils.tf_utils",), "importing tensorflow-addons", "fastaccum.addons"
    ),
    "tf_keras_engine": Place(
        ("tf_keras.src.engine",), "importing tensorflow-addons", "fastaccum.addons"
    ),
    "tf_keras_keras_tensor": Place(
        ("tf_keras.src.engine.keras_tensor",), "importing tensorflow-addons", "fastaccum.addons"
    ),
}
# The package by which tensorflow-addons 0.23 imports `keras_tensor`.
ADDONS_EXPECTS = "keras.src.engine"


def has(name: str) -> bool:
    """Tells if the installed releases have one of the `PLACES`."""
    return _find(name) is not None


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    value = _find(name)
    if value is None:
        place = PLACES[name]
        raise MissingName(
            f"TensorFlow {_version('tensorflow')} with Keras {_version('keras')} has none of "
            f"{', '.join(place.places)}, needed for {place.serves}. Off without it: "
            f"{place.without}. Install versions that pyproject.toml allows, or leave that "
            "feature out."
        )
    return value


@functools.cache
def _find(name: str) -> Any:
    return PLACES[name].find()


def missing() -> dict[str, Place]:
    """Returns the `PLACES` that the installed releases lack, by name."""
    return {name: place for name, place in PLACES.items() if not has(name)}


def _version(package: str) -> str:
    return getattr(importlib.import_module(package), "__version__", "of an unknown version")


# Attributes of TensorFlow's objects.

call_flat = Method(
    "_call_flat",
    of="ConcreteFunction",
    serves="calling a program under a tape, and with another replica's variables",
)
is_jit_compiled = Attribute("_jit_compile", of="tf.function", serves="telling an XLA program")
get_function = Method(
    "_get_function", of="tf.Graph", serves="reading the loops and branches of a trace"
)
iterator_resource = Attribute(
    "_iterator_resource", of="iterators of tf.data", serves="saving an iterator's state"
)
iterator_shapes = Attribute(
    "_flat_output_shapes", of="iterators of tf.data", serves="a Ctrl-C while the data is read"
)
dataset_inputs = Method(
    "_inputs", of="tf.data.Dataset", serves="finding the shuffles in a pipeline"
)
dataset_functions = Method(
    "_functions", of="tf.data.Dataset", serves="finding the functions in a pipeline"
)
repeat_count = Attribute("_count", of="repeated datasets", serves="telling an endless pipeline")
batch_size = Attribute("_batch_size", of="batched datasets", serves="how many rows a batch has")
shuffle_seed = Attribute("_seed", of="shuffled datasets", serves="telling a shuffle without a seed")
shuffle_seed2 = Attribute(
    "_seed2", of="shuffled datasets", serves="telling a shuffle without a seed"
)
cache_filename = Attribute("_filename", of="cached datasets", serves="telling a cache on disk")
variable_creator_stack = Attribute(
    "_variable_creator_stack", of="tf.Graph", serves="leaving a strategy's scope"
)
DefaultDistributionStrategy = Attribute(
    "_DefaultDistributionStrategy", of="distribute_lib", serves="telling that there is no strategy"
)
DefaultReplicaThreadMode = Attribute(
    "_DefaultReplicaThreadMode", of="distribute_lib", serves="leaving a strategy's scope"
)
push_per_thread_mode = Method(
    "_push_per_thread_mode", of="distribute_lib", serves="leaving a strategy's scope"
)
pop_per_thread_mode = Method(
    "_pop_per_thread_mode", of="distribute_lib", serves="leaving a strategy's scope"
)
# TensorFlow numbers the collectives of every strategy alike; two in a process end in an
# InternalError.
collective_key_base = Attribute(
    "_collective_key_base", of="a strategy's extended", serves="a second strategy"
)
collective_ops = Attribute(
    "_collective_ops", of="a strategy's extended", serves="a second strategy"
)
cross_device_ops = Attribute(
    "_cross_device_ops", of="a strategy's extended", serves="a second strategy"
)
make_collective_ops = Method(
    "_make_collective_ops_with_fallbacks", of="a strategy's extended", serves="a second strategy"
)
id_in_cluster = Attribute(
    "_id_in_cluster", of="a strategy's extended", serves="the number of a worker"
)
distributed_container = Method(
    "_distributed_container", of="handles of variables", serves="finding another replica's variable"
)
gradients_by_name = Attribute(
    "_registry", of="the gradient registry", serves="freeing custom gradients"
)

# Attributes of nodes in a graph's definition.
OUTPUT_SHAPES = "_output_shapes"  # the shapes of all results
# Set on what Keras compiles by itself, as a grouped convolution.
XLA_MUST_COMPILE = "_XlaMustCompile"
# The operations that a node must be placed with, which may be missing in a copy of a part.
PLACED_WITH = "_class"

# Attributes of Keras's layers and models.

keras_mask = Attribute(
    "_keras_mask", of="tensors", serves="the mask that layers attach to a tensor"
)
distribute_strategy = Attribute(
    "_distribute_strategy", of="models", serves="the strategy of a model"
)
variable_value = Attribute(
    "_value", of="keras.Variable", serves="one replica's component of a variable"
)
variable_dtype = Attribute(
    "_dtype", of="keras.Variable", serves="a variable's dtype outside of autocast"
)
variable_path = Attribute(
    "_path", of="keras.Variable", serves="an optimizer that tells weights by their paths"
)
flatten_layers = Method("_flatten_layers", of="keras.Layer", serves="every nested layer")
seed_generators = Attribute(
    "_seed_generators", of="keras.Layer", serves="the seeds of a layer, without inner layers'"
)
initial_seed = Attribute(
    "_initial_seed", of="keras.random.SeedGenerator", serves="a seed that stacked layers share"
)
own_state = Attribute(
    "_non_trainable_variables",
    of="keras.Layer",
    serves="a layer's own variables, without inner layers'",
)
trainable_variables = Attribute(
    "_trainable_variables",
    of="keras.Layer and optimizers",
    serves="a layer's own weights; those of an optimizer",
)
metrics = Attribute(
    "_metrics", of="keras.Layer", serves="metrics that a model and its layers hold themselves"
)
compute_loss = Method(
    "_compute_loss", of="keras.Model", serves="calling a model's own compute_loss"
)
compile_loss = Attribute("_compile_loss", of="keras.Model", serves="what a model was compiled with")
losses_override = Attribute(
    "_losses_override", of="keras.Model", serves="scaling what compute_loss takes from Keras"
)
compile_metrics = Attribute(
    "_compile_metrics", of="keras.Model", serves="metrics of a model that a callback saves"
)
loss_tracker = Attribute(
    "_loss_tracker", of="keras.Model", serves="telling a model's own metrics from `compile`'s"
)
user_loss = Attribute("_user_loss", of="CompileLoss", serves="what a model was compiled with")
user_loss_weights = Attribute(
    "_user_loss_weights", of="CompileLoss", serves="what a model was compiled with"
)
user_metrics = Attribute(
    "_user_metrics", of="CompileMetrics", serves="what a model was compiled with"
)
user_weighted_metrics = Attribute(
    "_user_weighted_metrics", of="CompileMetrics", serves="what it was compiled with"
)
flat_metrics = Attribute("_flat_metrics", of="CompileMetrics", serves="the metrics of each output")
flat_weighted_metrics = Attribute(
    "_flat_weighted_metrics", of="CompileMetrics", serves="the metrics of each output"
)
functional = Attribute(
    "_functional", of="keras.Sequential", serves="the graph of a Sequential, its output names"
)
run_through_graph = Method(
    "_run_through_graph", of="functional models", serves="fa.remat in segments of a graph"
)
nodes_by_depth = Attribute(
    "_nodes_by_depth", of="functional models", serves="fa.remat in segments of a graph"
)
remat_mode = Attribute(
    "_remat_mode", of="keras.Layer", serves="refusing a keras.RematScope by the layer's name"
)
is_default_build = Attribute(
    "_is_default", of="a layer's `build`", serves="telling a layer built at its first call"
)
track_trackable = Method(
    "_track_trackable", of="keras.Layer", serves="stacked weights in tf.train.Checkpoint"
)
kernel = Attribute(
    "_kernel", of="keras.Layer and KerasHub's MaskedLMHead", serves="a layer's float32 weight"
)
bias = Attribute("_bias", of="KerasHub's MaskedLMHead", serves="its linear layer's weights")
embeddings = Attribute(
    "_embeddings", of="keras.layers.Embedding", serves="a layer's float32 weight"
)
compute_causal_padding = Method(
    "_compute_causal_padding", of="keras.layers.Conv1D", serves="a convolution's padding"
)
autocast = Attribute(
    "_autocast", of="tf_keras layers", serves="LinearCrossEntropy's head in its own dtype"
)
intermediate_dense = Method(
    "_intermediate_dense", of="KerasHub's MaskedLMHead", serves="LinearCrossEntropy there"
)
intermediate_layer_norm = Method(
    "_intermediate_layer_norm", of="KerasHub's MaskedLMHead", serves="LinearCrossEntropy there"
)

# Attributes of attention layers: the parts after the projections, the mask, the scores' factor,
# Dropout.

compute_attention = Method("_compute_attention", of="attention layers", serves="fused attention")
compute_causal_mask = Method(
    "_compute_causal_mask", of="attention layers", serves="fused attention: the mask"
)
masked_softmax = Method("_masked_softmax", of="attention layers", serves="fused attention")
softmax = Attribute("_softmax", of="attention layers", serves="fused attention")
inv_norm_factor = Attribute(
    "_inv_norm_factor", of="KerasHub's attention", serves="fused attention: the factor"
)
inverse_sqrt_key_dim = Attribute(
    "_inverse_sqrt_key_dim",
    of="keras.layers.MultiHeadAttention",
    serves="fused attention: the factor",
)
inverse_sqrt_head_dim = Attribute(
    "_inverse_sqrt_head_dim",
    of="keras.layers.GroupQueryAttention",
    serves="fused attention: the factor",
)
dropout_layer = Attribute(
    "_dropout_layer", of="attention layers", serves="fused attention: Dropout of the weights"
)
attn_dropout_layer = Attribute(
    "_attn_dropout_layer", of="KerasHub's GPT-NeoX", serves="fused attention: Dropout"
)
return_attention_scores = Attribute(
    "_return_attention_scores", of="attention layers", serves="fused attention"
)

# Attributes of Keras's metrics and losses.

fn = Attribute("_fn", of="keras.metrics.MeanMetricWrapper", serves="the function in a metric")
fn_kwargs = Attribute(
    "_fn_kwargs", of="metrics and tf_keras losses", serves="the arguments of that function"
)
crossentropy = Attribute(
    "_crossentropy", of="KerasHub's Perplexity", serves="Perplexity with LinearCrossEntropy"
)

# Attributes of Keras's optimizers.

learning_rate = Attribute(
    "_learning_rate", of="optimizers", serves="the variable of a learning rate"
)
current_learning_rate = Method(
    "_get_current_learning_rate", of="optimizers", serves="one trace of the decay of many weights"
)
variables = Attribute("_variables", of="optimizers", serves="which lists of an optimizer are slots")
moving_averages = Attribute(
    "_model_variables_moving_average", of="optimizers", serves="averages of weights"
)
var_key = Method("_var_key", of="optimizers", serves="which slot belongs to which weight")
variables_indices = Attribute(
    "_trainable_variables_indices", of="optimizers", serves="the weights it was built with"
)
optimizer_of_variable = Attribute(
    "_var_to_optimizer_idx", of="MultiOptimizer", serves="a weight's optimizer"
)
apply_weight_decay = Method(
    "_apply_weight_decay", of="optimizers", serves="one trace of the decay of many weights"
)
use_weight_decay = Method(
    "_use_weight_decay", of="optimizers", serves="what exclude_from_weight_decay was told of"
)
ADAFACTOR_R = "_r"  # Adafactor's placeholder variables, int32 and never read
ADAFACTOR_C = "_c"
# Methods that a user's optimizer may override, and that the fused step then would not call as Keras
# does.
COMPUTE_GRADIENTS = "_compute_gradients"
TRANSFORM_GRADIENTS = "_transform_unaggregated_gradients"
OVERRIDABLE_UPDATES = (
    "_backend_apply_gradients",
    "_backend_update_step",
    "_clip_gradients",
    "_apply_weight_decay",
)

# Attributes of Keras's callbacks: the counters that a resumed training needs, by the callback's
# class.

CALLBACK_MODEL = "_model"
global_train_batch = Attribute(
    "_global_train_batch", of="TensorBoard", serves="the number of a step"
)
GLOBAL_TEST_BATCH = "_global_test_batch"
MODEL_CHECKPOINT_COUNTERS = (
    "_batches_seen_since_last_saving",
    "_last_batch_seen",
    "_current_epoch",
)
EMA_WEIGHTS_IN_MODEL = "_ema_weights_in_model"
initial_epoch = Attribute(
    "_initial_epoch", of="keras.Model", serves="where BackupAndRestore says to go on"
)
training_state = Attribute(
    "_training_state", of="tf_keras models", serves="where BackupAndRestore says to go on"
)
train_counter = Attribute("_train_counter", of="tf_keras models", serves="the number of a step")
is_tracing = Attribute(
    "_is_tracing", of="TensorBoard", serves="ending a profile after its last step"
)

# Attributes of tf_keras and tensorflow-addons, which are developed no further.

eager_losses = Attribute("_eager_losses", of="tf_keras layers", serves="losses that a call added")
callable_losses = Attribute("_callable_losses", of="tf_keras layers", serves="regularisers")
own_weights_state = Attribute(
    "_non_trainable_weights", of="tf_keras layers", serves="a layer's own state"
)
user_losses = Attribute(
    "_user_losses", of="tf_keras's LossesContainer", serves="what a model was compiled with"
)
using_dummy_loss = Attribute(
    "_using_dummy_loss", of="Hugging Face models", serves="what it was compiled with"
)
built = Attribute("_built", of="tf_keras optimizers", serves="slots before the trace")
index_dict = Attribute(
    "_index_dict", of="tf_keras optimizers", serves="the weights it was built with"
)
iterations = Attribute(
    "_iterations", of="tf_keras optimizers", serves="one counter for wrapped optimizers"
)
hyper = Attribute(
    "_hyper", of="tf_keras's legacy optimizers", serves="learning rates of wrapped optimizers"
)
get_hyper = Method(
    "_get_hyper", of="tf_keras's legacy optimizers", serves="from which step SWA averages"
)
wrapped_optimizer = Attribute(
    "_optimizer", of="wrapping optimizers", serves="all slots of wrapped optimizers"
)
slots = Attribute(
    "_slots", of="tf_keras's legacy optimizers", serves="the weights it was built with"
)
unique_id = Attribute("_unique_id", of="tf.Variable", serves="slots by weight")
optimizer_name = Attribute("_name", of="tf_keras's legacy optimizers", serves="the names of slots")
create_all_weights = Method(
    "_create_all_weights", of="tf_keras's legacy optimizers", serves="slots before the trace"
)
optimizer_strategy = Attribute(
    "_distribution_strategy", of="optimizers", serves="the strategy of an optimizer"
)
resource_apply_dense = Method(
    "_resource_apply_dense", of="legacy optimizers", serves="rows without a lookup"
)
resource_apply_sparse = Method(
    "_resource_apply_sparse", of="legacy optimizers", serves="rows without a lookup"
)
momentum = Attribute("_momentum", of="legacy optimizers", serves="rows without a lookup")


def _print_missing() -> None:
    absent = missing()
    print(
        f"TensorFlow {_version('tensorflow')}, Keras {_version('keras')}: {len(PLACES)} names, "
        f"{len(absent)} missing"
    )
    for name, place in absent.items():
        print(f"{name}: not at {' or '.join(place.places)}. Off: {place.without}.")


if __name__ == "__main__":
    _print_missing()
