"""The replicas of tf.distribute: the strategy of a model, its variables and programs on each
device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.distribute.workers import Workers
from fastaccum.kernels import private
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.step.tracing import TracedFunction

Scope = Callable[[], contextlib.AbstractContextManager[None]]
SUPPORTED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
_strategies: list[tf.distribute.Strategy] = []  # that models have been trained under


def replicas_for(model: Model) -> Replicas | None:
    """Returns the replicas of a model that was made under a strategy's scope; None for another
    model.
    """
    # of the scope in which the model was made
    strategy = private.distribute_strategy(model.model, None)
    outside = strategy is None or isinstance(
        strategy, private.DefaultDistributionStrategy(private.distribute_lib)
    )
    if not model.trains_on_replicas and (not outside or tf.distribute.has_strategy()):
        raise ValueError(
            f"model={model.model.name!r} is a tf_keras model, which trains on one device: make "
            "it and this Trainer outside the scope of "
            f"{type(tf.distribute.get_strategy() if outside else strategy).__name__}, or use a "
            "Keras 3 model there."
        )
    if outside:
        if tf.distribute.has_strategy():
            raise ValueError(
                "The model was made outside the scope of "
                f"{type(tf.distribute.get_strategy()).__name__}, in which this Trainer is made: "
                "make the model inside it too."
            )
        return None
    name = type(strategy).__name__
    if not isinstance(strategy, SUPPORTED):
        raise ValueError(
            f"The model was made under {name}: use {' or '.join(s.__name__ for s in SUPPORTED)}, "
            "whose replicas hold all weights and take every step together."
        )
    for layer in model.layers:
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"Layer {layer.name!r} ({type(layer).__name__}) has synchronized=True, which "
                "reduces over the replicas in every micro-batch: make it with "
                "synchronized=False."
            )
    _number_collectives(strategy)
    return Replicas(strategy)


def _number_collectives(strategy: tf.distribute.Strategy) -> None:
    """Numbers the collectives of a second strategy apart; TensorFlow numbers those of each strategy
    from 1 on.
    """
    if strategy in _strategies:
        return
    others, extended = len(_strategies), strategy.extended
    if others and not isinstance(strategy, tf.distribute.MirroredStrategy):
        raise ValueError(
            "The model was made under a second strategy of this process, a "
            f"{type(strategy).__name__}, whose collectives TensorFlow would take for the first "
            "one's: make one strategy, and all models under it."
        )
    _strategies.append(strategy)  # for good: its numbers are not free again
    if others:
        private.collective_key_base.set(extended, 1000 * others)
        of_its_own = private.make_collective_ops(extended)
        # and none that the user chose
        if private.cross_device_ops(extended) is private.collective_ops(extended):
            private.cross_device_ops.set(extended, of_its_own)
        private.collective_ops.set(extended, of_its_own)


def on_first_replica(replicas: Replicas | None) -> contextlib.AbstractContextManager[None]:
    """Enters `first_components` if there are replicas."""
    return contextlib.nullcontext() if replicas is None else first_components()


@contextlib.contextmanager
def outside_scope() -> Iterator[None]:
    """Leaves every strategy's scope inside the block, for the variables and programs that are made
    there.
    """
    graph = private.framework_ops.get_default_graph()
    creators = private.variable_creator_stack(graph)
    private.variable_creator_stack.set(graph, [])
    private.push_per_thread_mode(
        private.distribute_lib, private.DefaultReplicaThreadMode(private.distribute_lib)()
    )
    try:
        yield
    finally:
        private.pop_per_thread_mode(private.distribute_lib)
        private.variable_creator_stack.set(graph, creators)


def _read_component(variable: keras.Variable) -> tf.Variable:
    """Stands in for `keras.Variable._value`: reads the first local component of a distributed
    variable.
    """
    value = vars(variable)[private.variable_value.name]
    return (
        value.values[0]
        if isinstance(value, private.distributed_values.DistributedVariable)
        else value
    )


def _write_component(variable: keras.Variable, value: tf.Variable) -> None:
    vars(variable)[private.variable_value.name] = value


@contextlib.contextmanager
def first_components() -> Iterator[None]:
    """Lets every Keras variable inside the block be that of the first local replica, and hides the
    strategy.

    A program is so traced for one device; `Replicas.on` then finds the variables of another.
    """
    with outside_scope():
        private.variable_value.set(keras.Variable, property(_read_component, _write_component))
        try:
            yield
        finally:
            delattr(keras.Variable, private.variable_value.name)


class Replicas(Workers):
    """Holds the replicas of a strategy: their devices and variables in this process, and their
    reductions.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self.strategy = strategy
        self.count = strategy.num_replicas_in_sync  # on all workers
        self.devices = list(strategy.extended.worker_devices)  # this process's, one a replica
        super().__init__(
            private.id_in_cluster(strategy.extended, 0), self.count // len(self.devices)
        )
        self.first = self.worker * len(self.devices)
        # among all replicas
        self.ids = [tf.constant(self.first + i, tf.int64) for i in range(len(self.devices))]
        self._collectives: dict[tuple, tuple[ConcreteFunction, list[tf.Tensor]]] = {}
        self._copies: dict[int, tuple[tf.Tensor, list[tf.Variable]]] = {}

    def require_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ValueError if the optimizer is not one of Keras 3."""
        if not isinstance(optimizer.optimizer, keras.Optimizer):
            raise ValueError(
                f"optimizer={type(optimizer.optimizer).__name__} is not a Keras 3 optimizer: under "
                f"{type(self.strategy).__name__}, use one."
            )

    @property
    def shards(self) -> slice:
        """The shards of a micro-batch that are this process's."""
        return slice(self.first, self.first + len(self.devices))

    # Variables.

    @staticmethod
    def holds(variable: tf.Variable) -> bool:
        """Tells if a variable has a component on every replica."""
        return isinstance(variable, private.distributed_values.DistributedVariable)

    def mirror(self, variables: Sequence[keras.Variable]) -> None:
        """Gives Keras variables that were made outside the scope a component on every replica, of
        equal value.
        """
        for variable in variables:
            if not self.holds(own := variable.value):
                with self.strategy.scope():
                    known = {"dtype": own.dtype, "trainable": own.trainable, "name": own.name[:-2]}
                    private.variable_value.set(variable, tf.Variable(own.numpy(), **known))

    def unmirror(self, holders: Sequence[object]) -> None:
        """Replaces the distributed variables of Keras variables and loss scales by plain ones of
        equal value.
        """
        for holder in holders:
            attributes = vars(holder)
            for name, own in list(attributes.items()):
                if isinstance(own, private.distributed_values.DistributedVariable):
                    with outside_scope():
                        # by which checkpoints know it
                        value, own_name = own.values[0].numpy(), own.name.split(":")[0]
                        attributes[name] = tf.Variable(
                            value, trainable=False, name=own_name, dtype=own.dtype
                        )

    def place(self, variable: keras.Variable, replica: int) -> None:
        """Moves a Keras variable to the device of one replica, which alone has it then.

        On the other workers it has a shape and no value, nor memory for one.
        """
        own, local = variable.value, replica - self.first
        known = {"dtype": own.dtype, "trainable": own.trainable, "name": own.name.split(":")[0]}
        with outside_scope():
            if local not in range(len(self.devices)):
                if not isinstance(own, private.UninitializedVariable):
                    private.variable_value.set(
                        variable, private.UninitializedVariable(shape=own.shape, **known)
                    )
            elif (
                isinstance(own, private.distributed_values.DistributedVariable)
                or own.device != self.devices[local]
            ):
                with tf.device(self.devices[local]):
                    private.variable_value.set(variable, tf.Variable(own.read_value(), **known))

    def on(self, replica: int, handle: tf.Tensor) -> tf.Tensor:
        """Returns the handle of a replica's variable, from the handle of the first local replica's.

        `synchronize` copies a variable that no strategy knows (a running mean, a loss scale) from
        the first replica before each step, since the host may have assigned it. A variable that the
        replica alone has is its own.
        """
        if replica == 0 or handle.dtype != tf.resource or handle.device == self.devices[replica]:
            return handle
        if private.distributed_container.exists(handle):
            return private.distributed_container(handle).values[replica].handle
        if id(handle) not in self._copies:
            spec = private.get_eager_safe_handle_data(handle).shape_and_type[0]
            with tf.init_scope(), outside_scope():
                zeros = tf.zeros(tf.TensorShape(spec.shape), spec.dtype)
                copies = []
                for device in self.devices[1:]:
                    with tf.device(device):
                        copies.append(tf.Variable(zeros, trainable=False))
            self._copies[id(handle)] = handle, copies
        return self._copies[id(handle)][1][replica - 1].handle

    def synchronize(self) -> None:
        """Assigns the first replica's values to the copies that `on` made, in the graph."""
        for handle, copies in self._copies.values():
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=copies[0].dtype)
            for copy in copies:
                with tf.device(copy.device):
                    copy.assign(value)

    # Collectives.

    def all_reduce(self, nests: Sequence[Any], place: int = 0) -> list[Any]:
        """Sums nests of tensors, one of each local replica, over all replicas; returns the sum on
        each local one.

        One collective reduces them, of float32 numbers (float64, if a tensor has them) where the
        tensors differ in dtype. Those of a graph whose tensors are alike need places of their own.
        """
        sums = self._collective(_summed, [flat(nest) for nest in nests], place)
        return [like(nest, each) for nest, each in zip(nests, sums, strict=True)]

    def all_gather(self, tensors: Sequence[tf.Tensor], place: int = 0) -> Sequence[tf.Tensor]:
        """Joins flat tensors of equal length, one of each local replica, in the order of all
        replicas, on each.
        """
        joined = self._collective(_gathered, tensors, place)
        return [tf.ensure_shape(each, [self.count * tensors[0].shape[0]]) for each in joined]

    def _collective(
        self,
        function: Callable[[tf.Tensor], tf.Tensor],
        tensors: Sequence[tf.Tensor],
        place: int = 0,
    ) -> Sequence[tf.Tensor]:
        """Calls a collective function of one replica's tensor on all replicas.

        Its key is settled once for each shape: workers whose programs differ agree on the key, and
            TensorFlow, which
        keeps what it knows of every key, does not grow with each step.
        """
        spec = tf.TensorSpec(tensors[0].shape, tensors[0].dtype)
        key = function, spec, place
        if key not in self._collectives:

            def collective_on_all(tensors: list[tf.Tensor]) -> tuple[tf.Tensor, ...]:
                results = self.strategy.run(
                    function, args=(private.distributed_values.PerReplica(tensors),)
                )
                return self.strategy.experimental_local_results(results)

            with tf.init_scope(), outside_scope(), graph_scoped_gradients():
                traced = tf.function(collective_on_all, autograph=False).get_concrete_function(
                    [spec] * len(tensors)
                )
                self._collectives[key] = traced, traced.captured_inputs
        traced, captured = self._collectives[key]
        return private.call_flat(traced, list(tensors), captured)


# Of one replica, in its context. The identity is on the replica's device, which the collective asks
# for.


def _summed(own: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_reduce(
        tf.distribute.ReduceOp.SUM, tf.identity(own)
    )


def _gathered(own: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_gather(tf.identity(own), axis=0)


def flat(nest: object) -> tf.Tensor:
    """Joins the numbers of a nest of tensors in one flat tensor."""
    tensors = [t for t in tf.nest.flatten(nest) if t is not None]
    dtype = common_dtype(tensors)
    return tf.concat([tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors], 0)


def common_dtype(tensors: Iterable[tf.Tensor | tf.TensorSpec | tf.Variable]) -> tf.DType:
    """Returns the dtype of all tensors, or where these differ float32 (float64, if one has it)."""
    dtypes = {t.dtype for t in tensors}
    return dtypes.pop() if len(dtypes) == 1 else tf.float64 if tf.float64 in dtypes else tf.float32


def like(nest: Any, flat: tf.Tensor) -> Any:
    """Returns a flat tensor's numbers in the structure, shapes and dtypes of a nest."""
    parts = iter(
        tf.split(flat, [t.shape.num_elements() for t in tf.nest.flatten(nest) if t is not None])
    )
    return tf.nest.map_structure(
        lambda t: None if t is None else tf.cast(tf.reshape(next(parts), t.shape), t.dtype), nest
    )


class ReplicaProgram(TracedFunction):
    """A compiled function of one replica, traced with the first replica's variables and called with
    any's.

    `program(*args)` traces the function, if need be; `program(*args)(i, *args)` calls it on local
    replica i, in a graph; `only` that replica calls it, if given.
    """

    last: TracedProgram  # the latest trace

    def __init__(
        self,
        function: Callable[..., object],
        replicas: Replicas,
        uses_xla: bool,
        scope: Scope,
        only: int | None = None,
    ):
        super().__init__(function, uses_xla)
        self._replicas, self._scope = replicas, scope
        self._called_on = range(len(replicas.devices)) if only is None else [only]

    def __call__(self, *args: object) -> TracedProgram:
        with first_components(), self._scope():
            concrete = self.trace(*_specs(args))
        self.last = TracedProgram(concrete, self._replicas, self._called_on)
        return self.last


class TracedProgram:
    """A `ReplicaProgram` for arguments of known shapes; `outputs` are specs of the results."""

    def __init__(self, concrete: ConcreteFunction, replicas: Replicas, called_on: Iterable[int]):
        self.concrete, self._replicas = concrete, replicas
        self.outputs = _specs(concrete.structured_outputs)
        # Copies of variables must exist before the graph that synchronizes them.
        self.captured = {
            i: [replicas.on(i, handle) for handle in concrete.captured_inputs] for i in called_on
        }

    def __call__(self, replica: int, *args: object) -> Any:
        with tf.device(self._replicas.devices[replica]):
            return private.call_flat(
                self.concrete,
                [t for t in tf.nest.flatten(args) if t is not None],
                self.captured[replica],
            )


def _specs(nest: Any) -> Any:
    return tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), nest
    )
