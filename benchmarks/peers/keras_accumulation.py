"""Keras 3's own accumulation: `gradient_accumulation_steps` on the optimizer, and `model.fit`."""

from benchmarks.support.contestants import Fit


def make(workload, steps_per_execution=1, jit_compile="auto"):
    """`model.fit` with accumulation; the defaults are those of `compile`."""
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
    """Every combination that a patient user would try: `{name: Fit}`."""
    return {
        f"Keras GA, {steps} steps/execution, {'jit' if jit else 'no jit'}": make(
            workload, steps, jit
        )
        for steps in workload.steps_per_execution
        for jit in (False, True)
    }
