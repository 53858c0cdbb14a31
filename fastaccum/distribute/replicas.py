"""The replicas of tf.distribute: which strategy a model has, its variables and programs on each device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, values
from tensorflow.python.framework import ops
from tensorflow.python.ops.resource_variable_ops import get_eager_safe_handle_data

from fastaccum.adapters.models import Model
from fastaccum.distribute.workers import Workers
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.kernels.random_keys import hoist_prng_key
from fastaccum.step import xla_cache

SUPPORTED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
_strategies: list[tf.distribute.Strategy] = []  # that models have been trained under


def of(model: Model) -> Replicas | None:
    """The replicas of a model that was made under a strategy's scope, None for one that was not; ValueError if the
    strategy or a layer is not supported, or the scope was entered only after the model was made.
    """
    strategy = getattr(model.model, "_distribute_strategy", None)  # of the scope in which the model was made
    outside = strategy is None or isinstance(strategy, distribute_lib._DefaultDistributionStrategy)
    if model.legacy and (not outside or tf.distribute.has_strategy()):
        raise ValueError(
            f"model={model.model.name!r} is a tf_keras model, which trains on one device: make it and this Trainer "
            f"outside the scope of {type(tf.distribute.get_strategy() if outside else strategy).__name__}, or use a "
            "Keras 3 model there."
        )
    if outside:
        if tf.distribute.has_strategy():
            raise ValueError(
                f"The model was made outside the scope of {type(tf.distribute.get_strategy()).__name__}, in which this "
                "Trainer is made: make the model inside it too."
            )
        return None
    name = type(strategy).__name__
    if not isinstance(strategy, SUPPORTED):
        raise ValueError(
            f"The model was made under {name}: use {' or '.join(s.__name__ for s in SUPPORTED)}, whose replicas hold "
            "all weights and take every step together."
        )
    for layer in model.layers:
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"Layer {layer.name!r} ({type(layer).__name__}) has synchronized=True, which reduces over the replicas "
                "in every micro-batch: make it with synchronized=False."
            )
    _number_collectives(strategy)
    return Replicas(strategy)


def _number_collectives(strategy: tf.distribute.Strategy) -> None:
    """TensorFlow numbers the collectives of each strategy alike, from 1 on: those of a second one get their own."""
    if strategy in _strategies:
        return
    others, extended = len(_strategies), strategy.extended
    if others and not isinstance(strategy, tf.distribute.MirroredStrategy):
        raise ValueError(
            f"The model was made under a second strategy of this process, a {type(strategy).__name__}, whose "
            "collectives TensorFlow would take for the first one's: make one strategy, and all models under it."
        )
    _strategies.append(strategy)  # for good: its numbers are not free again
    if others:
        extended._collective_key_base = 1000 * others
        of_its_own = extended._make_collective_ops_with_fallbacks()
        if extended._cross_device_ops is extended._collective_ops:  # and none that the user chose
            extended._cross_device_ops = of_its_own
        extended._collective_ops = of_its_own


def first_of(replicas: Replicas | None) -> contextlib.AbstractContextManager:
    """`first_components`, where there are replicas."""
    return contextlib.nullcontext() if replicas is None else first_components()


@contextlib.contextmanager
def outside_scope() -> Iterator[None]:
    """Within it variables and programs are made as if no strategy's scope had been entered."""
    graph = ops.get_default_graph()
    creators, graph._variable_creator_stack = graph._variable_creator_stack, []
    distribute_lib._push_per_thread_mode(distribute_lib._DefaultReplicaThreadMode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()
        graph._variable_creator_stack = creators


class _FirstComponent:
    """In place of `keras.Variable._value`: the first local component of a distributed variable."""

    def __get__(self, variable: Any, owner: type | None = None) -> Any:
        value = vars(variable)["_value"]
        return value.values[0] if isinstance(value, values.DistributedVariable) else value

    def __set__(self, variable: Any, value: Any) -> None:
        vars(variable)["_value"] = value


@contextlib.contextmanager
def first_components() -> Iterator[None]:
    """Within it every Keras variable is that of the first local replica alone, and no strategy is seen.

    So a program is traced for one device as if there were no others; `Replicas.on` then finds the variables of another.
    """
    with outside_scope():
        keras.Variable._value = _FirstComponent()
        try:
            yield
        finally:
            del keras.Variable._value


class Replicas(Workers):
    """The replicas of a strategy, those of this process among them, and the workers that they are on."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self.strategy = strategy
        self.count = strategy.num_replicas_in_sync  # on all workers
        self.devices = list(strategy.extended.worker_devices)  # this process's, one a replica
        super().__init__(getattr(strategy.extended, "_id_in_cluster", 0), self.count // len(self.devices))
        self.first = self.worker * len(self.devices)
        self.ids = [tf.constant(self.first + i, tf.int64) for i in range(len(self.devices))]  # among all replicas
        self._reductions: dict[tf.TensorSpec, tuple[Any, list[tf.Tensor]]] = {}
        self._copies: dict[int, tuple[tf.Tensor, list[tf.Variable]]] = {}

    def require_optimizer(self, optimizer: Any) -> None:
        """Raises ValueError if the optimizer is not one of Keras 3."""
        if not isinstance(optimizer.optimizer, keras.Optimizer):
            raise ValueError(
                f"optimizer={type(optimizer.optimizer).__name__} is not a Keras 3 optimizer: under "
                f"{type(self.strategy).__name__}, use one."
            )

    @property
    def shards(self) -> slice:
        """Of the shards that a micro-batch is cut into, this process's."""
        return slice(self.first, self.first + len(self.devices))

    # Variables.

    def mirror(self, variables: Sequence[keras.Variable]) -> None:
        """Gives Keras variables that were made outside the scope a component on every replica, of the same value."""
        for variable in variables:
            own = variable.value
            if not isinstance(own, values.DistributedVariable):
                with self.strategy.scope():
                    variable._value = tf.Variable(
                        own.numpy(), dtype=own.dtype, trainable=own.trainable, name=own.name[:-2]
                    )

    def unmirror(self, holders: Sequence[Any]) -> None:
        """Objects that were made under the scope get plain variables in place of distributed ones, of the same value.

        So do Keras variables and loss scales, whose variables are `on` each replica by being copied.
        """
        for holder in holders:
            attributes: Any = vars(holder)
            for name, own in list(attributes.items()):
                if isinstance(own, values.DistributedVariable):
                    with outside_scope():
                        value, own_name = own.values[0].numpy(), own.name.split(":")[0]  # by which checkpoints know it
                        attributes[name] = tf.Variable(value, trainable=False, name=own_name, dtype=own.dtype)

    def on(self, replica: int, handle: tf.Tensor) -> tf.Tensor:
        """The handle of a local replica's variable, from that of the first's.

        A variable that no strategy knows (a running mean, a loss scale) is copied from the first replica
        before each step, by `synchronize`: the host may have assigned it.
        """
        if replica == 0 or handle.dtype != tf.resource:
            return handle
        if hasattr(handle, "_distributed_container"):
            return handle._distributed_container().values[replica].handle
        if id(handle) not in self._copies:
            spec = get_eager_safe_handle_data(handle).shape_and_type[0]
            with tf.init_scope(), outside_scope():
                zeros = tf.zeros(tf.TensorShape(spec.shape), spec.dtype)
                copies = []
                for device in self.devices[1:]:
                    with tf.device(device):
                        copies.append(tf.Variable(zeros, trainable=False))
            self._copies[id(handle)] = handle, copies
        return self._copies[id(handle)][1][replica - 1].handle

    def synchronize(self) -> None:
        """In the graph: what `on` copied takes the first replica's values."""
        for handle, copies in self._copies.values():
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=copies[0].dtype)
            for copy in copies:
                with tf.device(copy.device):
                    copy.assign(value)

    # Reduction.

    def all_reduce(self, nests: Sequence[Any]) -> list[Any]:
        """The sum over all replicas, on each local one, from a nest of tensors of each: one collective, of
        float32 numbers (float64, where a tensor has them) if the tensors differ in dtype.

        Its key is settled once for each shape, whatever programs call it: workers agree on it where their programs
        differ, and TensorFlow, which keeps what it knows of every key, does not grow with each step.
        """
        tensors = [self._flat(nest) for nest in nests]
        spec = tf.TensorSpec(tensors[0].shape, tensors[0].dtype)
        if spec not in self._reductions:
            with tf.init_scope(), outside_scope(), graph_scoped_gradients():
                reduced = tf.function(self._reduced, autograph=False).get_concrete_function([spec] * len(tensors))
                self._reductions[spec] = reduced, reduced.captured_inputs
        reduced, captured = self._reductions[spec]
        sums = reduced._call_flat(tensors, captured)
        return [_like(nest, flat) for nest, flat in zip(nests, sums, strict=True)]

    def _flat(self, nest: Any) -> tf.Tensor:
        tensors = [t for t in tf.nest.flatten(nest) if t is not None]
        dtypes = {t.dtype for t in tensors}
        dtype = dtypes.pop() if len(dtypes) == 1 else tf.float64 if tf.float64 in dtypes else tf.float32
        return tf.concat([tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors], 0)

    def _reduced(self, tensors: list[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        def reduce(own):
            own = tf.identity(own)  # on the replica's device, which the collective asks for
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, own)

        return self.strategy.experimental_local_results(self.strategy.run(reduce, args=(values.PerReplica(tensors),)))


def _like(nest: Any, flat: tf.Tensor) -> Any:
    """A flat tensor in the structure, shapes and dtypes of a nest."""
    sizes = [t.shape.num_elements() for t in tf.nest.flatten(nest) if t is not None]
    parts = iter(tf.split(flat, sizes))
    return tf.nest.map_structure(
        lambda t: None if t is None else tf.cast(tf.reshape(next(parts), t.shape), t.dtype), nest
    )


class ReplicaProgram:
    """A compiled function of one replica: traced on the first one's variables, and called with those of any.

    `program(*args)` traces it, if need be; `program(*args)(i, *args)` calls it on local replica i, in a graph.

    `around` makes a scope for the trace.
    """

    last: TracedProgram  # as it was traced last

    def __init__(self, function: Callable[..., Any], replicas: Replicas, jit_compile: bool, around: Callable[[], Any]):
        drawing = hoist_prng_key()(function)
        self._compiled = functools.partial(tf.function, drawing, jit_compile=jit_compile, autograph=False)
        self._traced = function
        self._replicas, self._around = replicas, around
        self.retrace()

    def retrace(self) -> None:
        """Lets go of what was traced."""
        self._function = self._compiled()

    def __call__(self, *args: Any) -> TracedProgram:
        specs = _specs(args)
        with first_components(), self._around(), graph_scoped_gradients(), xla_cache.numbered(self._traced):
            concrete = self._function.get_concrete_function(*specs)
        self.last = TracedProgram(concrete, self._replicas)
        return self.last


class TracedProgram:
    """A `ReplicaProgram` for arguments of known shapes; `outputs` are specs of what it returns."""

    def __init__(self, concrete: Any, replicas: Replicas):
        self.concrete, self._replicas = concrete, replicas
        self.outputs = _specs(concrete.structured_outputs)
        # Copies of variables must exist before the graph that synchronizes them.
        self.captured = [
            [replicas.on(i, handle) for handle in concrete.captured_inputs] for i in range(len(replicas.devices))
        ]

    def __call__(self, replica: int, *args: Any) -> Any:
        tensors = [t for t in tf.nest.flatten(args) if t is not None]
        with tf.device(self._replicas.devices[replica]):
            return self.concrete._call_flat(tensors, self.captured[replica])


def _specs(nest: Any) -> Any:
    return tf.nest.map_structure(lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), nest)
