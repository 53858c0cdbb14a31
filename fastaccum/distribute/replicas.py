"""The replicas of a tf.distribute strategy: a model's variables and programs on each device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.types.experimental import ConcreteFunction

from fastaccum.adapters.models import Model
from fastaccum.adapters.optimizers import Optimizer
from fastaccum.basics import patches
from fastaccum.basics.processes import Workers
from fastaccum.kernels import private
from fastaccum.kernels.custom_gradients import graph_scoped_gradients
from fastaccum.step.tracing import TracedFunction

Scope = Callable[[], contextlib.AbstractContextManager[None]]
SUPPORTED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
# Between the first keys of two strategies' collectives: more keys than one strategy takes.
KEYS_OF_A_STRATEGY = 1000
_strategies: list[tf.distribute.Strategy] = []  # that models have been trained under


def replicas_for(model: Model) -> Replicas | None:
    """Returns the replicas of a model that was made in a strategy's scope, or None."""
    # The strategy of the scope in which the model was made.
    strategy = private.distribute_strategy(model.model, None)
    made_outside = strategy is None or isinstance(
        strategy, private.DefaultDistributionStrategy(private.distribute_lib)
    )

    if not model.trains_on_replicas and (not made_outside or tf.distribute.has_strategy()):
        scope = strategy
        if made_outside:
            scope = tf.distribute.get_strategy()
        raise ValueError(
            f"model={model.model.name!r} is a tf_keras model, which trains on one device: make "
            f"it and this Trainer outside the scope of {type(scope).__name__}, or use a "
            "Keras 3 model there."
        )

    if made_outside:
        if tf.distribute.has_strategy():
            raise ValueError(
                "The model was made outside the scope of "
                f"{type(tf.distribute.get_strategy()).__name__}, in which this Trainer is made: "
                "make the model inside it too."
            )
        return None

    if not isinstance(strategy, SUPPORTED):
        supported = " or ".join(kind.__name__ for kind in SUPPORTED)
        raise ValueError(
            f"The model was made under {type(strategy).__name__}: use {supported}, "
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
    """Numbers the collectives of a second strategy apart from those of the first.

    TensorFlow numbers the collectives of each strategy from 1 on.
    """
    if strategy in _strategies:
        return
    earlier = len(_strategies)
    if earlier and not isinstance(strategy, tf.distribute.MirroredStrategy):
        raise ValueError(
            "The model was made under a second strategy of this process, a "
            f"{type(strategy).__name__}, and TensorFlow would mix up the collectives of the two: "
            "make one strategy, and all models under it."
        )
    _strategies.append(strategy)  # for good: its numbers are not free again
    if earlier == 0:
        return

    extended = strategy.extended
    private.collective_key_base.set(extended, KEYS_OF_A_STRATEGY * earlier)
    renumbered = private.make_collective_ops(extended)
    # Cross-device operations that the user chose stay.
    if private.cross_device_ops(extended) is private.collective_ops(extended):
        private.cross_device_ops.set(extended, renumbered)
    private.collective_ops.set(extended, renumbered)


def on_first_replica(replicas: Replicas | None) -> contextlib.AbstractContextManager[None]:
    """Enters `first_components` if there are replicas."""
    if replicas is None:
        return contextlib.nullcontext()
    return first_components()


@contextlib.contextmanager
def outside_scope() -> Iterator[None]:
    """Leaves every strategy's scope in the block, for variables and programs made there."""
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
    """Reads the first local component of a distributed variable, as `keras.Variable._value`."""
    value = vars(variable)[private.variable_value.name]
    if isinstance(value, private.distributed_values.DistributedVariable):
        return value.values[0]
    return value


def _write_component(variable: keras.Variable, value: tf.Variable) -> None:
    """Writes what `_read_component` reads."""
    vars(variable)[private.variable_value.name] = value


@contextlib.contextmanager
def first_components() -> Iterator[None]:
    """Makes every Keras variable in the block that of the first local replica; hides the strategy.

    So a program is traced for one device. `Replicas.on` then finds the variables of another.
    """
    with outside_scope():
        value = private.variable_value.name
        with patches.variable_values(keras.Variable, value, _read_component, _write_component):
            yield


class Replicas(Workers):
    """The replicas of a strategy: devices and variables in this process, and reductions."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self.strategy = strategy
        self.count = strategy.num_replicas_in_sync  # on all workers
        self.devices = list(strategy.extended.worker_devices)  # this process's, one a replica
        worker = private.id_in_cluster(strategy.extended, 0)
        super().__init__(worker, self.count // len(self.devices))
        # The numbers of this process's replicas among all replicas.
        self.first = self.worker * len(self.devices)
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
        """Gives Keras variables made outside the scope an equal component on each replica."""
        for variable in variables:
            value = variable.value
            if self.holds(value):
                continue
            with self.strategy.scope():
                mirrored = tf.Variable(
                    value.numpy(),
                    dtype=value.dtype,
                    trainable=value.trainable,
                    name=value.name[:-2],  # without ":0"
                )
                private.variable_value.set(variable, mirrored)

    def unmirror(self, holders: Sequence[object]) -> None:
        """Makes distributed variables of Keras variables and loss scales plain, of equal value."""
        for holder in holders:
            attributes = vars(holder)
            for attribute, variable in list(attributes.items()):
                if not isinstance(variable, private.distributed_values.DistributedVariable):
                    continue
                with outside_scope():
                    attributes[attribute] = tf.Variable(
                        variable.values[0].numpy(),
                        trainable=False,
                        name=variable.name.split(":")[0],  # by which checkpoints know it
                        dtype=variable.dtype,
                    )

    def place(self, variable: keras.Variable, replica: int) -> None:
        """Moves a Keras variable to the device of one replica, which alone has it then.

        On the other workers it has a shape and no value, nor memory for one.
        """
        value = variable.value
        local_replica = replica - self.first
        options = {
            "dtype": value.dtype,
            "trainable": value.trainable,
            "name": value.name.split(":")[0],
        }
        with outside_scope():
            if local_replica not in range(len(self.devices)):
                if not isinstance(value, private.UninitializedVariable):
                    placeholder = private.UninitializedVariable(shape=value.shape, **options)
                    private.variable_value.set(variable, placeholder)
                return
            device = self.devices[local_replica]
            if self.holds(value) or value.device != device:
                with tf.device(device):
                    placed = tf.Variable(value.read_value(), **options)
                    private.variable_value.set(variable, placed)

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
        _, copies = self._copies[id(handle)]
        return copies[replica - 1].handle

    def synchronize(self) -> None:
        """Assigns the first replica's values to the copies that `on` made, in the graph."""
        for handle, copies in self._copies.values():
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=copies[0].dtype)
            for copy in copies:
                with tf.device(copy.device):
                    copy.assign(value)

    # Collectives.

    def all_reduce(self, nests: Sequence[Any], place: int = 0) -> list[Any]:
        """Sums nests of tensors, one of each local replica, over all replicas.

        Returns the sum on each local replica. One collective reduces all tensors of a nest. Where
        they differ in dtype, it reduces float32 numbers, or float64 if one of them has these.
        Collectives of one graph whose tensors are alike need places of their own.
        """
        sums = self._collective(_summed, [flat(nest) for nest in nests], place)
        return [like(nest, total) for nest, total in zip(nests, sums, strict=True)]

    def all_gather(self, tensors: Sequence[tf.Tensor], place: int = 0) -> Sequence[tf.Tensor]:
        """Joins flat tensors of equal length, in the order of all replicas, on each of them.

        `tensors` has one tensor of each local replica, and so has the result.
        """
        joined = self._collective(_gathered, tensors, place)
        length = self.count * tensors[0].shape[0]
        return [tf.ensure_shape(tensor, [length]) for tensor in joined]

    def _collective(
        self,
        function: Callable[[tf.Tensor], tf.Tensor],
        tensors: Sequence[tf.Tensor],
        place: int = 0,
    ) -> Sequence[tf.Tensor]:
        """Calls a collective function of one replica's tensor on all replicas.

        Its key is settled once for each shape. So workers whose programs differ agree on the key,
        and the memory of TensorFlow, which keeps what it knows of every key, does not grow with
        each step.
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
                program = tf.function(collective_on_all, autograph=False)
                traced = program.get_concrete_function([spec] * len(tensors))
                self._collectives[key] = traced, traced.captured_inputs

        traced, captured = self._collectives[key]
        return private.call_flat(traced, list(tensors), captured)


# Called for one replica, in its context. The collective asks for a tensor on the device of the
# replica, where the identity is.


def _summed(tensor: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(tensor))


def _gathered(tensor: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    return context.all_gather(tf.identity(tensor), axis=0)


def flat(nest: object) -> tf.Tensor:
    """Joins the numbers of a nest of tensors in one flat tensor."""
    tensors = [t for t in tf.nest.flatten(nest) if t is not None]
    dtype = common_dtype(tensors)
    return tf.concat([tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors], 0)


def common_dtype(tensors: Iterable[tf.Tensor | tf.TensorSpec | tf.Variable]) -> tf.DType:
    """Returns the dtype of all tensors, or where these differ float32 (float64, if one has it)."""
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) == 1:
        return dtypes.pop()
    if tf.float64 in dtypes:
        return tf.float64
    return tf.float32


def like(nest: Any, flat: tf.Tensor) -> Any:
    """Returns a flat tensor's numbers in the structure, shapes and dtypes of a nest."""
    sizes = [t.shape.num_elements() for t in tf.nest.flatten(nest) if t is not None]
    parts = iter(tf.split(flat, sizes))

    def take_part(tensor: tf.Tensor | None) -> tf.Tensor | None:
        if tensor is None:
            return None
        return tf.cast(tf.reshape(next(parts), tensor.shape), tensor.dtype)

    return tf.nest.map_structure(take_part, nest)


class ReplicaProgram(TracedFunction):
    """A compiled function of one replica, traced with the variables of the first local replica.

    `program(*args)` traces the function, if need be; `program(*args)(i, *args)` calls it on local
    replica i, with the variables of that replica, in a graph. Replica `only` alone calls it, if
    that is given.
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
        self._replicas = replicas
        self._scope = scope
        self._called_on: Sequence[int] = range(len(replicas.devices))
        if only is not None:
            self._called_on = [only]

    def __call__(self, *args: object) -> TracedProgram:
        with first_components(), self._scope():
            concrete = self.trace(*_specs(args))
        self.last = TracedProgram(concrete, self._replicas, self._called_on)
        return self.last


class TracedProgram:
    """A `ReplicaProgram` for arguments of known shapes; `outputs` are specs of the results."""

    def __init__(self, concrete: ConcreteFunction, replicas: Replicas, called_on: Iterable[int]):
        self.concrete = concrete
        self._replicas = replicas
        self.outputs = _specs(concrete.structured_outputs)
        # By local replica. Copies of variables must exist before the graph that synchronizes them.
        self.captured: dict[int, list[tf.Tensor]] = {}
        for i in called_on:
            self.captured[i] = [replicas.on(i, handle) for handle in concrete.captured_inputs]

    def __call__(self, replica: int, *args: object) -> Any:
        with tf.device(self._replicas.devices[replica]):
            tensors = [t for t in tf.nest.flatten(args) if t is not None]
            return private.call_flat(self.concrete, tensors, self.captured[replica])


def _specs(nest: Any) -> Any:
    """Returns the specs of a nest of tensors, specs and None."""

    def spec(tensor: tf.Tensor | tf.TensorSpec | None) -> tf.TensorSpec | None:
        return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)

    return tf.nest.map_structure(spec, nest)
