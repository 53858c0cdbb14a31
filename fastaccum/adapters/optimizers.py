"""One interface to optimizers, and those of Keras 3."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from fastaccum import checks
from fastaccum.adapters.guards import guard, is_users, unguard
from fastaccum.adapters.shared_updates import shared_updates
from fastaccum.adapters.slot_creation import made_in, settle
from fastaccum.adapters.storage import AS_KERAS, Storage, dtype_by_keras, dtype_of, scales_of
from fastaccum.basics.attributes import Variable, kinds, of_keras, raw, replaced
from fastaccum.basics.warnings import warn
from fastaccum.kernels import private
from fastaccum.kernels.xla_ops import in_xla

# What Keras's or tf_keras's own train step calls, and this one does not.
_UNCALLED = (
    "scale_loss",
    "minimize",
    "compute_gradients",
    private.COMPUTE_GRADIENTS,
    private.TRANSFORM_GRADIENTS,
)
# The methods of an update.
_OF_UPDATES = ("apply", "apply_gradients", "update_step", private.apply_weight_decay.name)
# of a MultiOptimizer: those of the optimizers inside are called
_OF_PARTS = ("apply", "apply_gradients")
Pairs = list[tuple[tf.Tensor, Variable]]  # of a gradient and its variable

# The methods by which a Keras optimizer assigns, each with the new value that it makes of the old
# one and of what it is passed.
_ASSIGNMENTS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "assign": lambda old, passed: passed,
    "assign_add": tf.add,
    "assign_sub": tf.subtract,
}


def _require_supported(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError for an optimizer that no compiled train step can run."""
    problem = _find_problem(optimizer)
    if problem is not None:
        raise ValueError(f"optimizer={type(optimizer).__name__} {problem}")


def _find_problem(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Says why an optimizer is not supported; None if it is.

    Such an optimizer does the train step's work, or does what no compiled program does.
    """
    optimizer_kinds = kinds(optimizer)
    hyper = private.hyper(optimizer, {})
    rate = private.learning_rate(optimizer, hyper.get("learning_rate"))
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    scale = getattr(optimizer, "loss_scale_factor", None)
    step_does = "which is the train step's work: make it without, and pass Trainer"
    if isinstance(rate, (keras.Variable, tf.Variable)):
        rate = float(raw(rate).numpy())

    scales_loss = (
        "keras.LossScaleOptimizer" in optimizer_kinds
        or "tf_keras.BaseLossScaleOptimizer" in optimizer_kinds
    )
    if scales_loss:
        return "scales the loss itself: pass the optimizer inside it, and Trainer(loss_scale=...)"
    if steps is not None:
        return (
            f"has gradient_accumulation_steps={steps}, "
            f"{step_does}(gradient_accumulation_steps={steps})"
        )
    if scale is not None:
        return (
            f"has loss_scale_factor={scale}, "
            f"{step_does}(loss_scale=fastaccum.StaticLossScale({scale}))"
        )
    if "tensorflow_addons.MultiOptimizer" in optimizer_kinds:
        return (
            "has an optimizer for each of some layers: use keras.optimizers.MultiOptimizer, or "
            "one optimizer"
        )
    for method in _UNCALLED:
        if is_users(optimizer, method):
            return (
                f"overrides {method}, which a train step never calls: override apply or "
                "update_step instead"
            )
    if "keras.MultiOptimizer" in optimizer_kinds:
        for method in _OF_PARTS:
            if is_users(optimizer, method):
                return (
                    f"overrides {method}, which a train step never calls: override that of the "
                    "optimizers inside"
                )
    if isinstance(rate, (int, float)) and not checks.in_float32(rate):
        return f"has learning_rate={rate}: pass a finite one, which float32 holds"
    if "tf_keras.Nadam" in optimizer_kinds and "tf_keras.OptimizerV2" not in optimizer_kinds:
        return (
            "counts updates in Python, which no compiled program does: use "
            "tf_keras.optimizers.legacy.Nadam"
        )
    return None


def _has_bfloat16(variables: Sequence[Variable]) -> bool:
    return any(dtype_of(variable) == tf.bfloat16 for variable in variables)


def _require_storable_slots(variables: Sequence[Variable], storage: Storage) -> None:
    """Raises ValueError for weights in a dtype whose updates are not computed in float32."""
    for variable in variables:
        dtype = dtype_of(variable)
        if dtype not in (tf.float32, tf.bfloat16):
            raise ValueError(
                f"optimizer_state_dtype={storage.optimizer_state_dtype!r}: variable "
                f"{raw(variable).name!r} is {dtype.name}, and only slots of float32 and bfloat16 "
                "weights are stored in fewer bytes. Make the model in float32, or pass "
                "optimizer_state_dtype='float32'."
            )


class Optimizer:
    """An optimizer as the train step uses it: `.optimizer` is the user's."""

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self.optimizer = optimizer
        # The weights that `build` made slots for. With a sharded optimizer: those of one device.
        self.trained: list[Variable] = []
        self.elsewhere: set[int] = set()  # ids of the weights and slots of other devices
        self.storage = AS_KERAS  # in which `create` has made the slots
        self._asked_for: Storage | None = None  # what `create` last did
        for part in self.parts:
            _require_supported(part)

    def build(self, variables: Sequence[Variable], storage: Storage = AS_KERAS) -> None:
        """Creates every slot for the trainable variables; a second call with them does nothing."""
        if self._is_built_on(variables):
            return
        self.require_known(variables)
        if self._asked_for != storage:
            self.create(variables, storage)
        for part in self.parts:  # MultiOptimizer may have found its optimizers only now
            _require_supported(part)
        self.trained = list(variables)

    def require_known(self, variables: Sequence[Variable]) -> None:
        """Raises ValueError if the optimizer was built on other variables, or can't train these."""
        if self._is_built_on(variables):
            return
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(
                    f"variable {variable.path!r} takes its gradient as value, which cannot be "
                    'accumulated. Make the model without quantize("float8"), and pass '
                    "fastaccum.Trainer(float8=True)"
                )
            if self.trained or not self._knows(self._to_native(variable)):
                raise ValueError(
                    f"optimizer={type(self.optimizer).__name__} was built on other variables, "
                    f"without {raw(variable).name!r}: make a new one; or, if the `trainable` of "
                    "a layer was switched since, switch it back"
                )

    def _is_built_on(self, variables: Sequence[Variable]) -> bool:
        if not self.trained:
            return False
        return [id(raw(v)) for v in variables] == [id(v) for v in self._model_variables]

    def create(self, variables: Sequence[Variable], storage: Storage) -> None:
        """Creates the slots in their stored dtype, and converts those that are there to it.

        Raises:
            ValueError: raised if the optimizer's slots cannot be stored so.
        """
        self.storage = self._storable(variables, storage)
        self._asked_for = storage
        if not getattr(self.optimizer, "built", False):
            self._create([self._to_native(v) for v in variables])

    def _storable(self, variables: Sequence[Variable], storage: Storage) -> Storage:
        """Returns the storage that the optimizer can have.

        Raises ValueError if that is not the storage of slots that was asked for, and warns if
        bfloat16 weights cannot be rounded stochastically.
        """
        has_bfloat16 = _has_bfloat16(variables)
        if not storage.changes_slots and not has_bfloat16:
            return AS_KERAS
        if storage.changes_slots:
            _require_storable_slots(variables, storage)
        problem = self._why_not_stored(variables, storage)
        if not problem:
            if storage == AS_KERAS:
                self._warn_of_betas()
            return storage
        name = type(self.optimizer).__name__
        if storage.changes_slots:
            raise ValueError(
                f"optimizer_state_dtype={storage.optimizer_state_dtype!r}: optimizer={name} "
                f"{problem}. Use a plain optimizer of keras.optimizers, such as AdamW, or pass "
                "optimizer_state_dtype='float32'."
            )
        if storage.stochastic_rounding:
            warn(
                f"The model's weights are bfloat16, and optimizer={name} {problem}. They are "
                "rounded to nearest, as by Keras: an update of less than half a unit of a weight's "
                "last place is lost. Use a plain optimizer of keras.optimizers, such as AdamW, "
                'whose updates are rounded stochastically, or the policy "mixed_bfloat16".',
                UserWarning,
            )
        self._warn_of_betas()
        return AS_KERAS

    def _warn_of_betas(self) -> None:
        """Warns of bfloat16 weights whose updates Keras computes with a beta_2 of 1."""
        for part in self.parts:
            part_kinds = kinds(part)
            if "keras.Adam" not in part_kinds and "keras.Nadam" not in part_kinds:
                continue
            beta = part.beta_2
            if float(tf.cast(beta, tf.bfloat16)) == 1.0:
                warn(
                    f"The model's weights are bfloat16, in which {type(part).__name__}'s "
                    f"beta_2={beta} is 1: its bias correction is 0, and no weight moves, or all "
                    "become NaN. Train with stochastic_rounding=True and a plain optimizer of "
                    'keras.optimizers, or under the policy "mixed_bfloat16".',
                    UserWarning,
                )

    def _why_not_stored(self, variables: Sequence[Variable], storage: Storage) -> str:
        """Says why an update can't read and write what is stored in few bytes; "" if it can."""
        return "is none of keras.optimizers"

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
        """Every tf.Variable that `apply` may change besides the model's.

        A select between their old and new values undoes a step.
        """
        states = [vars(part) for part in self.parts]
        # Adafactor's stand-ins for the factors that a vector lacks are never read. They are int32,
        # thus on the host.
        factors = [(s.get(private.ADAFACTOR_R), s.get(private.ADAFACTOR_C)) for s in states]
        stand_ins = [v for v in _find_variables(factors) if v.dtype == tf.int32]
        left_out = {id(v) for v in (*self._model_variables, *stand_ins)}
        left_out.update(self.elsewhere)

        by_id: dict[int, tf.Variable] = {}
        for variable in _find_variables(states):
            if id(variable) not in left_out:
                by_id[id(variable)] = variable
        return list(by_id.values())

    @property
    def scales(self) -> dict[int, tf.Variable]:
        """The scales of slots that are stored in int8 codes, by the id of the codes."""
        return {}

    @property
    def dtypes_by_keras(self) -> dict[int, tf.DType]:
        """The dtypes that Keras gives the slots that are stored in another, by id."""
        return {}

    @property
    def rounds_weights(self) -> bool:
        """True if bfloat16 weights are rounded stochastically."""
        return self.storage.stochastic_rounding and _has_bfloat16(self.trained)

    @property
    def needs_lookups(self) -> bool:
        """True if `apply` must know which rows of a table were looked up.

        Raises ValueError if it is unknown.
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
        costs a host sync on a GPU. Under tf.distribute, pass reduced gradients where nothing
        reduces them again: to Keras 3's optimizers outside the strategy's scope and `run`, to
        legacy and tensorflow-addons' ones in `run`. Where `needs_lookups`, `looked_up` has bool
        [rows] for each table that was looked up alone.
        """
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if not pairs:
            raise ValueError(
                "no variable has a gradient: the loss depends on no trainable variable"
            )
        rows_by_table = {}
        for variable, rows in zip(variables, looked_up, strict=False):
            if rows is not None:
                rows_by_table[raw(variable).ref()] = rows

        if ok is True and self.storage == AS_KERAS:
            with self._with_lookups(rows_by_table):
                self._update(pairs)
            return

        ok = tf.convert_to_tensor(ok)
        with self._selecting(ok, pairs) as selected, self._with_lookups(rows_by_table):
            before = []
            for variable in [*self._model_variables, *self.variables]:
                if id(variable) not in selected:
                    before.append((variable, variable.read_value()))
            self._update(pairs)
        for variable, value in before:
            if id(variable) not in selected:
                variable.assign(tf.where(ok, variable.read_value(), value))

    def _selecting(
        self, ok: tf.Tensor, pairs: Pairs
    ) -> contextlib.AbstractContextManager[set[int]]:
        """Lets assignments in the block select by `ok`; yields the ids of the variables that do.

        The block updates the variables of `pairs`, and adds those that turn out to select.
        """
        return contextlib.nullcontext(set())

    def _with_lookups(
        self, looked_up: Mapping[Hashable, tf.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """Updates tables inside the block by their lookups, bool [rows] by the tables' `ref()`."""
        return contextlib.nullcontext()

    @property
    def described(self) -> list[object]:
        """The objects that tell this optimizer from others, for a fingerprint."""
        return [self.optimizer]

    @property
    def settings(self) -> dict[str, list[tf.Variable]]:
        """The hyperparameters in variables, by name; others are constants of the traced step."""
        rate = raw(private.learning_rate(self.optimizer, None))
        if isinstance(rate, tf.Variable):
            return {"learning_rate": [rate]}
        return {}

    def rules(self, variable: Variable) -> dict[str, Any]:
        """Returns what is done to a trained variable beside its update.

        That may be a penalty, a constraint, or no weight decay.
        """
        rules = {}
        for name in ("regularizer", "constraint"):
            rule = getattr(variable, name, None)
            if rule is not None:
                rules[name] = rule
        decaying = [part for part in self.parts if private.use_weight_decay.exists(part)]
        if not all(private.use_weight_decay(part, self._to_native(variable)) for part in decaying):
            rules["decays"] = False
        return rules

    @property
    def iterations(self) -> tf.Variable:
        """Counts the updates."""
        return raw(self.optimizer.iterations)

    def finalize(self, variables: Sequence[Variable]) -> None:
        """Assigns the averages of `use_ema` to the variables after a first step.

        Keras does so at the end of `fit`.
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


def _assigns_itself(part: keras.optimizers.Optimizer) -> bool:
    """Tells if a method by which an optimizer assigns is the user's own."""
    return any(is_users(part, method) for method in _ASSIGNMENTS)


def _why_not_as_keras(part: keras.optimizers.Optimizer) -> str:
    """Says why an optimizer may not update variables of a spec alike, as Keras's own do; or ""."""
    if "keras.MultiOptimizer" in kinds(part):
        return "has several optimizers"
    rate = private.learning_rate(part, None)
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    if callable(rate) and not is_schedule:  # each call may return another one
        return (
            "has a function as learning_rate, which a "
            "keras.optimizers.schedules.LearningRateSchedule could be"
        )
    for method in (*_OF_UPDATES, *_ASSIGNMENTS):
        if is_users(part, method):
            return f"overrides {method}"
    if not of_keras(part):
        return "is of a class of your own"
    return ""


def _why_not_rounded(part: keras.optimizers.Optimizer, storage: Storage) -> str:
    """Says why one of Keras's optimizers does not bear slots that are rounded; "" if it does."""
    part_kinds = kinds(part)
    if "keras.RMSprop" in part_kinds and part.centered:
        return (
            "has centered=True: it takes a variance as the difference of two slots, which is below "
            "0 where they are rounded"
        )
    computes_weights = "keras.Ftrl" in part_kinds or "keras.ScheduleFreeAdamW" in part_kinds
    if storage.changes_slots and computes_weights:
        return "computes weights from its slots: rounded slots would round the weights"
    return ""


def _warn_of_sums(part: keras.optimizers.Optimizer, storage: Storage) -> None:
    """Warns of a slot that only grows, and stands still once its code is too coarse."""
    if storage.optimizer_state_dtype == "int8" and "keras.Adagrad" in kinds(part):
        warn(
            f"{type(part).__name__} adds up squared gradients, of which int8 drops those of less "
            "than half a unit of its code: over thousands of updates its learning rate falls less "
            "than it should. optimizer_state_dtype='bfloat16' is exact in the mean.",
            UserWarning,
        )


def _is_updated_alone(part: keras.optimizers.Optimizer, variable: keras.Variable) -> bool:
    """Tells if one of Keras's optimizers assigns a variable by decay and `update_step` alone."""
    return variable.constraint is None and not part.use_ema


class _Constraint(keras.constraints.Constraint):
    """A function as a Constraint, which a Keras variable needs before Keras 3.15."""

    def __init__(self, function: Callable[[tf.Tensor], tf.Tensor]):
        self._function = function

    def __call__(self, value: tf.Tensor) -> tf.Tensor:
        return self._function(value)


class Keras3Optimizer(Optimizer):
    """The optimizers of Keras 3."""

    def __init__(self, optimizer: keras.Optimizer):
        super().__init__(optimizer)
        self._seen_as: dict[int, keras.Variable] = {}

    def _to_native(self, variable: Variable) -> keras.Variable:
        if isinstance(variable, keras.Variable):
            return variable
        # Muon and Adafactor read what a tf.Variable has not, `path` and a name without slashes.
        if id(variable) not in self._seen_as:
            seen = keras.Variable(variable, name=variable.name.split(":")[0].replace("/", "_"))
            constraint = variable.constraint
            if constraint:
                constraint = _Constraint(constraint)
            seen.constraint = constraint
            self._seen_as[id(variable)] = seen
        return self._seen_as[id(variable)]

    @contextlib.contextmanager
    def _selecting(self, ok: tf.Tensor, pairs: Pairs) -> Iterator[set[int]]:
        # The weights are computed from the slots as assigned. Were these selected later, XLA would
        # compute the new slots twice, once from copies of the old ones: 8 bytes per parameter for
        # Adam.
        slots = {id(v) for v in self.variables}
        selected: set[int] = set()
        if any(_assigns_itself(part) for part in self.parts):
            yield selected  # the user's own assign what they like; `apply` selects after them
            return

        def hooked(assign, compute_new):
            def select(variable, value):
                assigned = raw(variable)
                if id(assigned) not in slots:
                    return assign(assigned, value)
                selected.add(id(assigned))
                old = assigned.read_value()
                new = compute_new(old, tf.cast(value, old.dtype))
                return assigned.assign(tf.where(ok, new, old))

            return select

        hooks = []
        for part in self.parts:
            for name, compute_new in _ASSIGNMENTS.items():
                hooks.append((part, name, hooked(getattr(part, name), compute_new)))
        native_pairs = [(gradient, self._to_native(v)) for gradient, v in pairs]
        with contextlib.ExitStack() as hooked_parts:
            if in_xla() or self.storage != AS_KERAS:
                for part in self.parts:
                    if _why_not_as_keras(part):
                        continue
                    sharing = shared_updates(
                        part, native_pairs, ok, self.storage, only_stored=not in_xla()
                    )
                    shared = hooked_parts.enter_context(sharing)
                    selected.update(shared)
                    for _, variable in native_pairs:
                        if not _is_updated_alone(part, variable):
                            selected.discard(id(raw(variable)))
            hooked_parts.enter_context(replaced(hooks))
            yield selected

    def create(self, variables: Sequence[Variable], storage: Storage) -> None:
        asked_for = storage
        storage = self._storable(variables, asked_for)
        for part in self.parts:
            unguard(part)
        if not self.optimizer.built:
            with made_in(self.optimizer, storage):
                self._create([self._to_native(v) for v in variables])
        self.storage = storage
        for part in self.parts:
            settle(part, storage)
            _warn_of_sums(part, storage)
            if any(dtype_by_keras(variable) for variable in part.variables):
                guard(part)
        self._asked_for = asked_for

    @property
    def scales(self) -> dict[int, tf.Variable]:
        scales = {}
        for part in self.parts:
            for variable in part.variables:
                scales_of_slot = scales_of(variable)
                if scales_of_slot is not None:
                    scales[id(raw(variable))] = raw(scales_of_slot)
        return scales

    @property
    def dtypes_by_keras(self) -> dict[int, tf.DType]:
        dtypes = {}
        for part in self.parts:
            for variable in part.variables:
                dtype = dtype_by_keras(variable)
                if dtype is not None:
                    dtypes[id(raw(variable))] = tf.as_dtype(dtype)
        return dtypes

    def _why_not_stored(self, variables: Sequence[Variable], storage: Storage) -> str:
        has_bfloat16 = _has_bfloat16(variables)
        for part in self.parts:
            problem = _why_not_as_keras(part) or _why_not_rounded(part, storage)
            if problem:
                return problem
            if part.use_ema and has_bfloat16:
                return "has use_ema, whose averages of bfloat16 weights Keras computes in bfloat16"
        return ""

    def _knows(self, variable: Variable) -> bool:
        known = private.variables_indices(self.optimizer)
        if not self.optimizer.built:
            return True
        return private.var_key(self.optimizer, variable) in known

    def _update(self, pairs: Pairs) -> None:
        # No cast: Keras clips in the gradient's dtype, then casts to the variable's. Its own step
        # calls this method too, which ends in `apply`.
        self.optimizer.apply_gradients([(g, self._to_native(v)) for g, v in pairs])


class MultiOptimizer(Keras3Optimizer):
    """The `keras.optimizers.MultiOptimizer`, with an optimizer for each group of variables."""

    @property
    def parts(self) -> list[keras.optimizers.Optimizer]:
        return [self.optimizer, *self.optimizer.optimizers]

    def _update(self, pairs: Pairs) -> None:
        # Its own `apply` wants a gradient for every variable.
        groups: dict[int, Pairs] = {}
        for gradient, variable in pairs:
            native = self._to_native(variable)
            indices = private.optimizer_of_variable(self.optimizer)
            index = indices[private.var_key(self.optimizer, native)]
            groups.setdefault(index, []).append((gradient, native))
        for index, group in groups.items():
            gradients = [gradient for gradient, _ in group]
            variables = [variable for _, variable in group]
            self.optimizer.optimizers[index].apply(gradients, variables)
        self.iterations.assign_add(1)


def _find_variables(value: object) -> Iterator[tf.Variable]:
    """Yields the tf.Variables in nested containers, in order."""
    value = raw(value)
    if isinstance(value, tf.Variable):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _find_variables(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _find_variables(item)
