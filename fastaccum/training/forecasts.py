"""Figures of a step before it runs: a micro-batch that fits, and `Trainer.summary`."""

from __future__ import annotations

from typing import Any, Literal

import keras

from fastaccum import checks
from fastaccum.adapters.data_adapters import is_read_once, wrap_sequence
from fastaccum.data.stacks import Batch
from fastaccum.layers.remat import installed
from fastaccum.memory import planner
from fastaccum.memory.analysis import specs
from fastaccum.memory.summary import Summary, summary
from fastaccum.step import compilable
from fastaccum.step.options import Options
from fastaccum.training.step_builder import StepBuilder


def make_plan(
    builder: StepBuilder,
    options: Options,
    sample: Batch,
    *,
    global_batch_size: int,
    at_most: int | None = None,
    memory_limit: int | str | None = None,
    recompute: Literal["auto"] | None = None,
    verbose: Literal["auto", 0, 1, 2] = "auto",
    bound_suffices: bool = False,
) -> planner.Plan:
    """Plans a micro-batch of `at_most` so many rows for data like `sample`; other arguments are
    `fastaccum.plan`'s.

    If a `bound_suffices`, as where the micro-batch is asked for and not its figures, nothing is
    compiled on a CPU that plainly has the room.
    """
    asked = {
        "memory_limit": memory_limit,
        "recompute": recompute,
        "verbose": verbose,
        "at_most": at_most,
    }
    builder.fingerprint.require_alike("plan", global_batch_size=global_batch_size, **asked)
    if recompute is not None:
        checks.one_of("recompute", recompute, ("auto",))
    if options.jit_compile is False:
        raise ValueError(
            "jit_compile=False: the memory of a step is read off XLA's plan, and without XLA "
            "there is none. Make the Trainer with jit_compile='auto', or pass a batch_size."
        )
    instead = "pass a batch_size: what fits is read off an XLA program"
    compilable.require(builder.recipe.model, instead)
    size, replicas = (
        checks.whole_number("global_batch_size", global_batch_size),
        builder.recipe.replicas,
    )
    rows = planner.candidates(size, 1 if replicas is None else replicas.count, at_most)
    step = builder.get_or_build(specs(sample, rows[-1]), options)
    compilable.require_no_python(builder.calling_python, instead)
    dispatched = options.steps_per_execution
    search = planner.Planner(
        step,
        sample,
        size,
        replicas=replicas,
        dispatched=dispatched,
        verbose=verbose,
        bound_suffices=bound_suffices,
    )
    # A model that computes again already does so as its user chose.
    policies = (
        planner.RECOMPUTED if recompute and not installed(step.objective.model.model) else (None,)
    )
    with step.translate_errors():
        return search.plan(rows, memory_limit, policies)


def plan_for_data(builder: StepBuilder, options: Options, data: Any, **asked: Any) -> planner.Plan:
    """Plans the micro-batch for data as `fit` takes them; `asked` are the other arguments of
    `fastaccum.plan`.
    """
    if hasattr(data, "__next__") or isinstance(wrap_sequence(data), keras.utils.PyDataset):
        raise TypeError(f"sample is a {type(data).__name__}: pass one of its batches, as a tuple.")
    with checks.naming("sample"):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    source = builder.recipe.make_source(
        x, y, sample_weight, options, batch_size=None, what="sample"
    )
    return make_plan(builder, options, source.sample, **asked)


def summarize(
    builder: StepBuilder,
    options: Options,
    x: object,
    y: object,
    sample_weight: object,
    batch_size: int | None,
) -> Summary:
    """Compiles the step for data as `fit` takes them, or for the data seen first where x is None;
    runs nothing.
    """
    if is_read_once(x):
        raise TypeError(
            f"x is a {type(x).__name__}, and reading a batch from it would lose that batch: pass "
            "one of its batches."
        )
    sample = builder.sample
    if x is not None:
        sample = builder.recipe.make_source(x, y, sample_weight, options, batch_size=None).sample
    if sample is None:
        raise ValueError("x=None, and this Trainer has seen no data yet: pass x and y as for fit.")
    if batch_size is not None:
        sample = specs(sample, checks.whole_number("batch_size", batch_size))
    if options.jit_compile is False:
        raise ValueError(
            "jit_compile=False: there is no XLA program to summarize. Pass jit_compile='auto'."
        )
    instead = "do without a summary, whose figures are those of an XLA program"
    compilable.require(builder.recipe.model, instead)
    step = builder.get_or_build(sample, options)
    compilable.require_no_python(builder.calling_python, instead)
    with step.translate_errors():
        return summary(step, sample, builder.training_layout(options))
