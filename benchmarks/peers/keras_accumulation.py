"""Accumulation of Keras 3: `gradient_accumulation_steps` on the optimizer, and `model.fit`."""

from benchmarks.support.contestants import Fit


def make(workload, steps_per_execution=1, jit_compile="auto"):
    """Makes the `Fit` of `model.fit` with accumulation; defaults are those of `compile`."""
    model = workload.model()
    model.compile(
        optimizer=workload.optimizer(gradient_accumulation_steps=workload.micro_batches),
        loss=workload.loss(),
        steps_per_execution=steps_per_execution,
        jit_compile=jit_compile,
    )

    def epoch(x, y):
        history = model.fit(
            x, y, batch_size=workload.batch_size, epochs=1, shuffle=False, verbose=0
        )
        return history.history["loss"][-1]

    return Fit(model, epoch)


def make_tuned(workload):
    """Makes `{name: Fit}` of every combination that a patient user would try."""
    fits = {}
    for steps in workload.steps_per_execution:
        name = f"Keras GA, {steps} steps/execution"
        fits[f"{name}, no jit"] = make(workload, steps, jit_compile=False)
        fits[f"{name}, jit"] = make(workload, steps, jit_compile=True)
    return fits
