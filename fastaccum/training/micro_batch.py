"""Plans the micro-batch of a Trainer's step, for `fastaccum.plan` and `batch_size="auto"`."""

from __future__ import annotations

from typing import Any, Literal

import keras

from fastaccum import checks
from fastaccum.adapters.data_adapters import wrap_sequence
from fastaccum.adapters.remat import installed
from fastaccum.data.stacks import Batch
from fastaccum.memory import planner
from fastaccum.memory.analysis import specs
from fastaccum.memory.plan import Plan
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
) -> Plan:
    """Plans the micro-batch for data like `sample`; the arguments are those of `fastaccum.plan`.

    Args:
        at_most: the most rows of a micro-batch.
    """
    asked = {"memory_limit": memory_limit, "recompute": recompute, "verbose": verbose, "at_most": at_most}
    builder.fingerprint.require_alike("plan", global_batch_size=global_batch_size, **asked)
    if recompute is not None:
        checks.one_of("recompute", recompute, ("auto",))
    if options.jit_compile is False:
        raise ValueError(
            "jit_compile=False: what a step needs is read off XLA's plan of its memory, and there is none. Make the "
            "Trainer with jit_compile='auto', or pass a batch_size."
        )
    compilable.require(builder.recipe.model, "pass a batch_size: what fits is read off an XLA program")
    global_batch_size = checks.whole_number("global_batch_size", global_batch_size)
    replicas = builder.recipe.replicas
    rows = planner.candidates(global_batch_size, 1 if replicas is None else replicas.count, at_most)
    step = builder.get_or_build(specs(sample, rows[-1]), options)
    search = planner.Planner(
        step,
        sample,
        global_batch_size,
        replicas=replicas,
        dispatched=options.steps_per_execution,
        verbose=verbose,
    )
    # A model that computes again already does so as its user chose.
    policies = planner.RECOMPUTED if recompute and not installed(step.objective.model.model) else (None,)
    with step.translate_errors():
        return search.plan(rows, memory_limit, policies)


def plan_for_data(builder: StepBuilder, options: Options, data: Any, **asked: Any) -> Plan:
    """Plans the micro-batch for data as `fit` takes them; `asked` are the other arguments of `fastaccum.plan`."""
    if hasattr(data, "__next__") or isinstance(wrap_sequence(data), keras.utils.PyDataset):
        raise TypeError(f"sample is a {type(data).__name__}: pass one of its batches, as a tuple.")
    with checks.naming("sample"):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    source = builder.recipe.make_source(x, y, sample_weight, options, batch_size=None, what="sample")
    return make_plan(builder, options, source.sample, **asked)
