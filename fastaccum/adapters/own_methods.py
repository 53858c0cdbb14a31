"""Refuses a model whose override of a Keras method a Trainer would never call."""

from __future__ import annotations

from fastaccum.adapters.models import Model
from fastaccum.basics.warnings import warn

_LOOPS = {
    "fit": "Do what it does first in your script, before trainer.fit; pass what it does in each "
    "epoch or batch as trainer.fit(callbacks=[...])",
    "evaluate": "Do what it does before and after in your script, around trainer.evaluate",
}
_STEPS = "train_step", "test_step", "make_train_function", "make_test_function"


def require_called(model: Model) -> None:
    """Raises ValueError, with a remedy, for a model's override of a method that is never called."""
    for name, remedy in _LOOPS.items():
        if model.replaces_loop(name):
            raise ValueError(
                f"{_overriding(model, [name])}, which Trainer.{name} would never call. {remedy}; "
                f"then remove it ({_removing(model, [name])})."
            )
    steps = [name for name in _STEPS if model.overrides(name)]
    if steps:
        raise ValueError(
            f"{_overriding(model, steps)}, which Trainer would never call. "
            f"{_advise_on_steps(model, steps)}"
        )
    passed_over = model.passed_over_methods
    if passed_over:
        raise ValueError(
            f"{_overriding(model, passed_over)}, which Trainer would never call. It calls "
            "compute_loss, compute_metrics and reset_metrics: override one of these, then "
            f"remove it ({_removing(model, passed_over)})."
        )
    if model.model.run_eagerly:
        warn(
            f"{model.model.name!r} was compiled with run_eagerly=True, which Trainer does not "
            "take over: it traces the step, once. Python code that is to run in each step, such "
            "as NumPy's, belongs in tf.numpy_function, with Trainer(jit_compile=False); prints "
            "in tf.print.",
            UserWarning,
        )


def _advise_on_steps(model: Model, steps: list[str]) -> str:
    """Lists what to do instead of overriding steps, the shortest remedy first."""
    removing = f"remove it ({_removing(model, steps)})"
    if all("test" in name for name in steps):
        return (
            f"If it does what Keras's does, {removing}. An evaluation calls compute_loss and "
            "compute_metrics: override those instead."
        )
    advice = [
        f"If it does what Keras's does, {removing}.",
        "If it only changes the data or makes the targets, remove it, and do that in "
        "dataset.map(...), or in call.",
    ]
    inner = [
        name
        for name, value in vars(model.model).items()
        if name[0] != "_" and isinstance(value, model.family)
    ]
    if inner:
        advice.append(
            f"If it trains one of the models inside ({', '.join(inner)}), pass that to Trainer."
        )
    advice += [
        "If it computes another loss, override compute_loss(x, y, y_pred, sample_weight) "
        "instead; if it returns further logs, compute_metrics(x, y, y_pred, sample_weight).",
        "If gradients or updates are of its own, write it with fastaccum.TrainStep(loss_fn, "
        "variables, optimizer), one for each optimizer.",
    ]
    if model.model.run_eagerly:
        advice.append("run_eagerly=True is not taken over: the step is traced.")
    return " ".join(advice)


def _overriding(model: Model, names: list[str]) -> str:
    return f"{type(model.model).__name__} overrides {' and '.join(names)}"


def _removing(model: Model, names: list[str]) -> str:
    """Returns statements that undo the overrides."""
    cls = type(model.model).__name__
    statements = []
    for name in names:
        if name in vars(model.model):
            statements.append(f"del model.{name}")
        else:
            statements.append(f"{cls}.{name} = {model.KIND}.{name}")
    return "; ".join(statements)
