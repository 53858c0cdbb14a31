"""One interface to the optimizers of Keras 3, tf_keras (new and legacy) and tensorflow-addons."""

from __future__ import annotations

import contextlib
import difflib
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters import fingerprint, saved, untouched_rows
from fastaccum.adapters.attributes import Variable, kinds, package, raw, replaced
from fastaccum.kernels import private
from fastaccum.lines import warn

_KNOWN_PACKAGES = ("keras", "tf_keras", "tensorflow_addons", "transformers")
# What Keras's or tf_keras's own train step calls, and this one does not.
_UNCALLED = (
    "scale_loss",
    "minimize",
    "compute_gradients",
    private.COMPUTE_GRADIENTS,
    private.TRANSFORM_GRADIENTS,
)
# of a MultiOptimizer: those of the optimizers inside are called
_OF_PARTS = "apply", "apply_gradients"
Pairs = list[tuple[tf.Tensor, Variable]]  # of a gradient and its variable


def get(
    optimizer: keras.optimizers.Optimizer, named: types.ModuleType = keras.optimizers
) -> Optimizer:
    """Returns the adapter for an optimizer of Keras 3, tf_keras or tensorflow-addons, or for a name
    in `named`.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        optimizer = _make_named(optimizer, named)
    if isinstance(optimizer, type):
        raise TypeError(
            f"optimizer={optimizer.__name__} is a class: call it, and pass what it makes"
        )
    own = kinds(optimizer)
    for kind, family in _FAMILIES.items():
        if kind in own:
            if vars(optimizer).pop(saved.SKIPPED, False):
                warn(
                    f"optimizer={type(optimizer).__name__} starts afresh: the state in its file "
                    "is not of what the loaded model trains, or Keras did not compile that. Is "
                    "LoRA lost? See docs/guides/saving.md."
                )
            return family(optimizer)
    raise TypeError(
        f"optimizer={optimizer!r} is of type {type(optimizer).__name__}: pass a Keras 3, "
        "tf_keras or "
        'tensorflow-addons optimizer, or a name such as "adamw"'
    )


def _make_named(name: str, optimizers: types.ModuleType) -> keras.optimizers.Optimizer:
    # Not every release of Keras has all of them.
    others = [
        getattr(optimizers, other, None)
        for other in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    ]
    exported = {k.lower(): v for k, v in vars(optimizers).items() if isinstance(v, type)}
    known = {
        k: v for k, v in exported.items() if issubclass(v, optimizers.Optimizer) and v not in others
    }
    if name.lower() in known:
        return known[name.lower()]()
    near = " or ".join(map(repr, difflib.get_close_matches(name.lower(), known)))
    raise ValueError(
        f"optimizer={name!r} is not a name of "
        f"{package(optimizers.Optimizer)}.optimizers.{f' Did you mean {near}?' if near else ''} "
        "Pass others as objects, or as tfa:NAME to `fastaccum train`."
    )


def is_users(optimizer: keras.optimizers.Optimizer, method: str) -> bool:
    """Tells if a method is the user's own, of the object or of a class, and not of a known
    package.
    """
    if method in vars(optimizer):
        return True
    function = getattr(type(optimizer), method, None)
    return function is not None and package(function) not in _KNOWN_PACKAGES


def _require_supported(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises for an optimizer that does the train step's work, or that no compiled program can
    run.
    """
    own, hyper = kinds(optimizer), private.hyper(optimizer, {})
    rate = private.learning_rate(optimizer, hyper.get("learning_rate"))
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    scale = getattr(optimizer, "loss_scale_factor", None)
    step_does = "which is the train step's work: make it without, and pass Trainer"
    if isinstance(rate, (keras.Variable, tf.Variable)):
        rate = float(raw(rate).numpy())
    if {"keras.LossScaleOptimizer", "tf_keras.BaseLossScaleOptimizer"} & own.keys():
        problem = (
            "scales the loss itself: pass the optimizer inside it, and Trainer(loss_scale=...)"
        )
    elif steps is not None:
        problem = (
            f"has gradient_accumulation_steps={steps}, "
            f"{step_does}(gradient_accumulation_steps={steps})"
        )
    elif scale is not None:
        problem = (
            f"has loss_scale_factor={scale}, "
            f"{step_does}(loss_scale=fastaccum.StaticLossScale({scale}))"
        )
    elif "tensorflow_addons.MultiOptimizer" in own:
        problem = (
            "has an optimizer for each of some layers: use keras.optimizers.MultiOptimizer, or "
            "one optimizer"
        )
    elif uncalled := [name for name in _UNCALLED if is_users(optimizer, name)]:
        problem = (
            f"overrides {uncalled[0]}, which a train step never calls: override apply or "
            "update_step instead"
        )
    elif "keras.MultiOptimizer" in own and (
        uncalled := [name for name in _OF_PARTS if is_users(optimizer, name)]
    ):
        problem = (
            f"overrides {uncalled[0]}, which a train step never calls: override that of the "
            "optimizers inside"
        )
    elif isinstance(rate, (int, float)) and not checks.in_float32(rate):
        problem = f"has learning_rate={rate}: pass a finite one, which float32 holds"
    elif "tf_keras.Nadam" in own and "tf_keras.OptimizerV2" not in own:
        problem = (
            "counts updates in Python, which no compiled program does: use "
            "tf_keras.optimizers.legacy.Nadam"
        )
    else:
        return
    raise ValueError(f"optimizer={type(optimizer).__name__} {problem}")


class Optimizer:
    """An optimizer as the train step uses it: `get` makes one, and `.optimizer` is the user's
    object.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self.optimizer = optimizer
        # that it was built with; while shared out over devices, those of one
        self.trained: list[Variable] = []
        self.elsewhere: set[int] = set()  # ids of the weights and slots of other devices
        for part in self.parts:
            _require_supported(part)

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates every slot for the trainable variables; a second call with the same ones does
        nothing.
        """
        if self.trained and [id(raw(v)) for v in variables] == [
            id(v) for v in self._model_variables
        ]:
            return
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(
                    f"variable {variable.path!r} takes its gradient as value, which cannot be "
                    "accumulated: train without float8 quantization"
                )
            if self.trained or not self._knows(self._to_native(variable)):
                raise ValueError(
                    f"optimizer={type(self.optimizer).__name__} was built on other variables, "
                    f"without {raw(variable).name!r}: make a new one; or, if the `trainable` of "
                    "a layer was switched since, switch it back"
                )
        if not getattr(self.optimizer, "built", False):
            self._create([self._to_native(v) for v in variables])
        for part in self.parts:  # MultiOptimizer may have found its optimizers only now
            _require_supported(part)
        self.trained = list(variables)

    @property
    def _model_variables(self) -> list[tf.Variable]:
        # Looked up each time: under a strategy they are other objects where a replica's program is
        # traced.
        return [raw(v) for v in self.trained]

    @property
    def parts(self) -> list[keras.optimizers.Optimizer]:
        """The optimizer objects that hold state: the user's and those it wraps."""
        return [self.optimizer]

    @property
    def variables(self) -> list[tf.Variable]:
        """Every tf.Variable that `apply` may change besides the model's: a select between old and
        new undoes a step.
        """
        states = [vars(part) for part in self.parts]
        # Adafactor's stand-ins for the factors that a vector lacks: never read, and int32, thus on
        # the host.
        stand_ins = [
            v
            for v in _find_variables(
                [(s.get(private.ADAFACTOR_R), s.get(private.ADAFACTOR_C)) for s in states]
            )
            if v.dtype == tf.int32
        ]
        left_out = {id(v) for v in (*self._model_variables, *stand_ins)} | self.elsewhere
        return list({id(v): v for v in _find_variables(states) if id(v) not in left_out}.values())

    @property
    def needs_lookups(self) -> bool:
        """True if `apply` must know which rows of a table were looked up; ValueError if it is
        unknown.
        """
        return False

    def apply(
        self,
        gradients: Sequence[tf.Tensor | None],
        variables: Sequence[Variable],
        ok: tf.Tensor | bool = True,
        looked_up: Sequence[tf.Tensor | None] = (),
    ) -> None:
        """Updates the variables where `ok`, and changes nothing elsewhere; creates no variable.

        The update is selected, not branched: XLA fuses a select into the update, where `tf.cond`
            costs a host sync on
        a GPU. Under tf.distribute, pass reduced gradients where nothing reduces them again: to
            Keras 3's optimizers
        outside the strategy's scope and `run`, to legacy and tensorflow-addons' ones in `run`.
        Where `needs_lookups`, `looked_up` has bool [rows] for each table that was looked up alone.
        """
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if not pairs:
            raise ValueError(
                "no variable has a gradient: the loss depends on no trainable variable"
            )
        rows = {
            raw(v).ref(): each
            for v, each in zip(variables, looked_up, strict=False)
            if each is not None
        }
        if ok is True:
            with self._with_lookups(rows):
                self._update(pairs)
            return
        changed = [*self._model_variables, *self.variables]
        before = [v.read_value() for v in changed]
        with self._selecting(ok) as selected, self._with_lookups(rows):
            self._update(pairs)
        for variable, value in zip(changed, before, strict=True):
            if id(variable) not in selected:
                variable.assign(tf.where(ok, variable.read_value(), value))

    def _selecting(self, ok: tf.Tensor | bool) -> contextlib.AbstractContextManager[set[int]]:
        """Lets assignments inside the block select by `ok`; yields the ids of the variables that
        do.
        """
        return contextlib.nullcontext(set())

    def _with_lookups(
        self, looked_up: Mapping[Hashable, tf.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Updates tables inside the block by their lookups, bool [rows] by the tables' `ref()`."""
        return contextlib.nullcontext()

    @property
    def description(self) -> dict[str, Any]:
        """The optimizer's class and arguments as they are now."""
        return fingerprint.describe(self.optimizer)

    @property
    def settings(self) -> dict[str, list[tf.Variable]]:
        """The hyperparameters that variables hold, by name; others are constants of the traced
        step.
        """
        rate = raw(private.learning_rate(self.optimizer, None))
        return {"learning_rate": [rate]} if isinstance(rate, tf.Variable) else {}

    def describe_rules(self, variable: Variable) -> dict[str, Any]:
        """Describes what is done to a trained variable beside its update: a penalty, a constraint,
        no weight decay.
        """
        rules = {name: getattr(variable, name, None) for name in ("regularizer", "constraint")}
        asked = [part for part in self.parts if private.use_weight_decay.exists(part)]
        if not all(private.use_weight_decay(part, self._to_native(variable)) for part in asked):
            rules["decays"] = False
        return fingerprint.describe(
            {name: rule for name, rule in rules.items() if rule is not None}
        )

    @property
    def iterations(self) -> tf.Variable:
        """Counts the updates."""
        return raw(self.optimizer.iterations)

    def finalize(self, variables: Sequence[Variable]) -> None:
        """Assigns the averages of `use_ema` to the variables, as Keras does at the end of `fit`,
        after a first step.
        """
        if (
            hasattr(self.optimizer, "finalize_variable_values")
            and int(tf.convert_to_tensor(self.iterations)) > 0
        ):
            self.optimizer.finalize_variable_values([self._to_native(v) for v in variables])

    def _to_native(self, variable: Variable) -> Variable:
        """Returns the variable as the family's own models have it."""
        return raw(variable)

    def _create(self, variables: list[Variable]) -> None:
        self.optimizer.build(variables)

    def _knows(self, variable: Variable) -> bool:
        """Returns False if the optimizer was built without this variable."""
        raise NotImplementedError

    def _update(self, pairs: Pairs) -> None:
        raise NotImplementedError


class _Constraint(keras.constraints.Constraint):
    """A function as a Constraint, which a Keras variable needs before Keras 3.15."""

    def __init__(self, function: Callable[[tf.Tensor], tf.Tensor]):
        self._function = function

    def __call__(self, value: tf.Tensor) -> tf.Tensor:
        return self._function(value)


class _Keras(Optimizer):
    def __init__(self, optimizer: keras.Optimizer):
        super().__init__(optimizer)
        self._seen_as: dict[int, keras.Variable] = {}

    def _to_native(self, variable: Variable) -> keras.Variable:
        if isinstance(variable, keras.Variable):
            return variable
        # Muon and Adafactor read what a tf.Variable has not, `path` and a name without slashes.
        if id(variable) not in self._seen_as:
            seen = keras.Variable(variable, name=variable.name.split(":")[0].replace("/", "_"))
            seen.constraint = variable.constraint and _Constraint(variable.constraint)
            self._seen_as[id(variable)] = seen
        return self._seen_as[id(variable)]

    @contextlib.contextmanager
    def _selecting(self, ok: tf.Tensor | bool) -> Iterator[set[int]]:
        # The weights are computed from the slots as assigned. Were these selected later, XLA would
        # compute the new slots twice, once from copies of the old ones: 8 bytes per parameter for
        # Adam.
        slots = {id(v) for v in self.variables}
        selected: set[int] = set()
        arithmetic = {"assign": lambda _, x: x, "assign_add": tf.add, "assign_sub": tf.subtract}
        if any(is_users(part, name) for part in self.parts for name in arithmetic):
            yield selected  # the user's own assign what they like; `apply` selects after them
            return

        def hooked(assign, new):
            def select(variable, value):
                own = raw(variable)
                if id(own) not in slots:
                    return assign(own, value)
                selected.add(id(own))
                old = own.read_value()
                return own.assign(tf.where(ok, new(old, tf.cast(value, old.dtype)), old))

            return select

        hooks = [
            (p, name, hooked(getattr(p, name), new))
            for p in self.parts
            for name, new in arithmetic.items()
        ]
        with replaced(hooks):
            yield selected

    def _knows(self, variable: Variable) -> bool:
        known = private.variables_indices(self.optimizer)
        return not self.optimizer.built or private.var_key(self.optimizer, variable) in known

    def _update(self, pairs: Pairs) -> None:
        # No cast: Keras clips in the gradient's dtype, then casts to the variable's. As its own
        # step calls it, which ends in `apply`.
        self.optimizer.apply_gradients([(g, self._to_native(v)) for g, v in pairs])


class _KerasMulti(_Keras):
    """The `keras.optimizers.MultiOptimizer`, with an optimizer for each group of variables."""

    @property
    def parts(self) -> list[keras.optimizers.Optimizer]:
        return [self.optimizer, *self.optimizer.optimizers]

    def _update(self, pairs: Pairs) -> None:
        # Its own `apply` wants a gradient for every variable.
        groups: dict[int, Pairs] = {}
        for gradient, variable in ((g, self._to_native(v)) for g, v in pairs):
            index = private.optimizer_of_variable(self.optimizer)[
                private.var_key(self.optimizer, variable)
            ]
            groups.setdefault(index, []).append((gradient, variable))
        for index, group in groups.items():
            self.optimizer.optimizers[index].apply(*map(list, zip(*group, strict=True)))
        self.iterations.assign_add(1)


class _TFKeras(Optimizer):
    """The optimizers of tf_keras since 2.11."""

    def _knows(self, variable: Variable) -> bool:
        built = private.built(self.optimizer, False)
        return not built or private.var_key(self.optimizer, variable) in private.index_dict(
            self.optimizer
        )

    def _update(self, pairs: Pairs) -> None:
        # Under mixed precision the dtype of a tf_keras model's variable is the compute dtype.
        dtypes = [getattr(raw(v), "true_dtype", v.dtype) for _, v in pairs]
        native = [(tf.cast(g, t), raw(v)) for (g, v), t in zip(pairs, dtypes, strict=True)]
        self.optimizer.apply_gradients(native, experimental_aggregate_gradients=False)
        for _, variable in pairs:
            # It applies constraints itself, but that of a keras.Variable is not on its tf.Variable.
            if isinstance(variable, keras.Variable) and variable.constraint is not None:
                variable.assign(variable.constraint(variable))


class _Legacy(_TFKeras):
    """The optimizers of tf_keras.optimizers.legacy, on which all of tensorflow-addons is built."""

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        super().__init__(optimizer)
        for part in self.parts:
            # A wrapper's `apply_gradients` does this, for the next level only, and while it is
            # traced.
            private.iterations.set(part, optimizer.iterations)
        hyperparameters = private.hyper(self.parts[-1])
        self._called = {name: value for name, value in hyperparameters.items() if callable(value)}
        for name, value in hyperparameters.items():
            if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
                # It knows tf_keras's schedules only, and calls this one as a function of no
                # arguments.
                hyperparameters[name] = lambda schedule=value: schedule(optimizer.iterations)
            elif type(value) is int:
                # It would become an int32 variable, which lives on the host.
                hyperparameters[name] = float(value)

    @property
    def parts(self) -> list[keras.optimizers.Optimizer]:
        # Lookahead, MovingAverage and SWA leave the state of the optimizer inside out of their
        # `variables()`.
        parts = [self.optimizer]
        while private.wrapped_optimizer.exists(parts[-1]):
            parts.append(private.wrapped_optimizer(parts[-1]))
        return parts

    @property
    def description(self) -> dict[str, Any]:
        # of which `get_config` tells the value
        return super().description | fingerprint.describe(self._called)

    @property
    def settings(self) -> dict[str, list[tf.Variable]]:
        hyperparameters = private.hyper(self.parts[-1])
        return {
            name: [value]
            for name, value in hyperparameters.items()
            if isinstance(value, tf.Variable)
        }

    @property
    def needs_lookups(self) -> bool:
        return untouched_rows.treats_apart(self.parts[-1])

    def _with_lookups(
        self, looked_up: Mapping[Hashable, tf.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        return replaced(untouched_rows.replace_dense_form(self.parts[-1], looked_up))

    def _knows(self, variable: Variable) -> bool:
        return not private.slots(self.optimizer) or private.unique_id(variable) in private.slots(
            self.optimizer
        )

    def _create(self, variables: list[Variable]) -> None:
        with tf.name_scope(
            private.optimizer_name(self.optimizer)
        ):  # as in its `apply_gradients`, for the names of the slots
            private.create_all_weights(self.optimizer, variables)
        if "tensorflow_addons.AveragedOptimizerWrapper" in kinds(self.optimizer):
            # What keras.callbacks.SwapEMAWeights swaps, by the names of Keras 3.
            private.trainable_variables.set(self.optimizer, variables)
            private.moving_averages.set(
                self.optimizer, [self.optimizer.get_slot(v, "average") for v in variables]
            )
            if private.optimizer_strategy(self.optimizer) is None:
                private.optimizer_strategy.set(self.optimizer, tf.distribute.get_strategy())


# The first that fits. By name, since tf_keras is imported only by those who use it.
_FAMILIES = {
    "keras.MultiOptimizer": _KerasMulti,
    "keras.Optimizer": _Keras,
    "tf_keras.Optimizer": _TFKeras,
    "tf_keras.OptimizerV2": _Legacy,
}


def _find_variables(value: object) -> Iterator[tf.Variable]:
    """Yields the tf.Variables in nested containers, in order."""
    value = raw(value)
    if isinstance(value, tf.Variable):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _find_variables(item)
