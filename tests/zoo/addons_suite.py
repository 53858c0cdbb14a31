"""tensorflow-addons' own optimizer tests with `fastaccum.TrainStep` behind `apply_gradients` and
`minimize`, and `fastaccum.Trainer` behind `fit`.

    .venv/bin/python tests/zoo/addons_suite.py PATH_TO_A_CHECKOUT_OF_ADDONS [--no-jit] [pytest's
    arguments]

Each update is a train step of one micro-batch, compiled by XLA: of the loss where the test gives
one, else of the sum of gradient * variable (for `IndexedSlices`, of values * looked-up rows). Cases
that fail for a reason are in notes.md, under "tensorflow-addons' own optimizer tests", by name (a
`*` stands for any ending); all others must pass.
"""

from __future__ import annotations

import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import contextlib
import functools
import importlib
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from keras_suite import Outcomes, listed, report

import fastaccum as fa

OPTIMIZER_TESTS = "tensorflow_addons/optimizers/tests"
HEADING = "## tensorflow-addons' own optimizer tests"


class Behind:
    """Routes every optimizer's updates, and tf_keras's `fit`, through fastaccum."""

    def __init__(self, jit_compile: bool):
        self._jit_compile, self._inside = jit_compile, False
        self._trainers: dict[int, tuple[Any, fa.Trainer]] = {}
        self._steps: dict[Any, tuple[Any, fa.TrainStep]] = {}

    def install(self) -> None:
        import tf_keras

        fa.addons.optimizers  # noqa: B018  # imports tensorflow-addons
        of_decay = fa.addons.optimizers.weight_decay_optimizers.DecoupledWeightDecayExtension
        classes = {tf_keras.optimizers.legacy.Optimizer, of_decay}
        for cls in iter(
            lambda: next(
                (c for k in classes for c in k.__subclasses__() if c not in classes), None
            ),
            None,
        ):
            classes.add(cls)
        for cls in classes:
            for name in ("apply_gradients", "minimize"):
                if name in vars(cls):
                    setattr(cls, name, self._behind(getattr(self, f"_{name}"), vars(cls)[name]))
        tf_keras.Model.fit = self._behind(self._fit, tf_keras.Model.fit)
        for name in ("testing_infra", "testing_infra.test_utils"):  # that its fixtures import
            sys.modules[f"keras.src.{name}"] = importlib.import_module(f"tf_keras.src.{name}")

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        """Within the scope methods are the libraries' own."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _behind(self, ours: Callable, theirs: Callable) -> Callable:
        @functools.wraps(theirs)
        def method(self_, *args, **kwargs):
            if self._inside:
                return theirs(self_, *args, **kwargs)
            with self._own():
                return ours(self_, *args, **kwargs)

        return method

    def _apply_gradients(self, optimizer: Any, grads_and_vars: Any, **arguments: Any) -> None:
        if arguments:
            raise TypeError(f"a train step takes no {' or '.join(arguments)}")
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        gradients, variables = zip(*pairs, strict=True)
        flat = [
            (g.values, g.indices) if isinstance(g, tf.IndexedSlices) else (g, None)
            for g in gradients
        ]

        def loss(given):
            products = [
                tf.cast((v if indices is None else tf.gather(v, indices)), tf.float64)
                * tf.cast(g, tf.float64)
                for (g, indices), v in zip(given, variables, strict=True)
            ]
            return tf.add_n([tf.reduce_sum(p) for p in products]), tf.constant(1.0)

        shapes = tuple((tuple(tf.shape(g).numpy()), i is None) for g, i in flat)
        stack = tf.nest.map_structure(
            lambda t: None if t is None else tf.convert_to_tensor(t)[tf.newaxis], flat
        )
        self._step((id(optimizer), *map(id, variables), shapes), optimizer, variables, loss)(stack)

    def _minimize(self, optimizer: Any, loss: Any, var_list: Any, tape: Any = None) -> None:
        if not callable(loss):
            return self._apply_gradients(
                optimizer, zip(tape.gradient(loss, var_list), var_list, strict=True)
            )

        def sums(_):
            value = loss()
            return tf.reduce_sum(value), tf.constant(1.0)

        variables = var_list() if callable(var_list) else var_list
        key = (id(optimizer), *map(id, variables), getattr(loss, "__code__", loss))
        self._step(key, optimizer, variables, sums)(tf.zeros([1]))

    def _step(self, key: Any, optimizer: Any, variables: Any, loss: Callable) -> fa.TrainStep:
        if key not in self._steps:
            step = fa.TrainStep(loss, variables, optimizer, jit_compile=self._jit_compile)
            self._steps[key] = (optimizer, variables), step
        return self._steps[key][1]

    def _fit(self, model: Any, x: Any = None, y: Any = None, **arguments: Any) -> Any:
        if id(model) not in self._trainers:
            # In mixed precision `compile` wraps it, which Trainer refuses, with the advice to
            # unwrap it.
            optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
            trainer = fa.Trainer(model, optimizer, model.loss, jit_compile=self._jit_compile)
            self._trainers[id(model)] = model, trainer
        return self._trainers[id(model)][1].fit(x, y, **arguments)


def main() -> int:
    checkout, *arguments = sys.argv[1:]
    jit_compile = "--no-jit" not in arguments
    arguments = [argument for argument in arguments if argument != "--no-jit"]
    Behind(jit_compile).install()
    outcomes = Outcomes()
    # where no package of the checkout hides the one installed
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(pathlib.Path(checkout, OPTIMIZER_TESTS), folder, dirs_exist_ok=True)
        shutil.copy(pathlib.Path(checkout, "tensorflow_addons/conftest.py"), folder)
        pathlib.Path(folder, "__init__.py").unlink()
        run = [
            "-q",
            "--no-header",
            "--tb=short",
            "-c",
            "/dev/null",
            "--rootdir",
            folder,
            "-p",
            "no:cacheprovider",
        ]
        pytest.main([*run, *arguments, folder], plugins=[outcomes])
    return report("tensorflow-addons 0.23", outcomes, listed(HEADING))


if __name__ == "__main__":
    sys.exit(main())
