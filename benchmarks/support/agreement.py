"""The check before any timing: contestants that are compared must compute the same thing.

After `UPDATES` updates from the same weights on the same data, losses agree to `LOSS_TOLERANCE`
(relative), and where each weight ends differs by at most `MOVEMENT_TOLERANCE` of the norm of its
movement. The second is the looser one: Adam divides by the gradient's own size, so rounding decides
where that is nearly 0, and in the ConvNet rounding switches ReLUs near 0, so that float32 gradients
are 0.3 % away from float64 ones in any program.

A weight whose gradient cancels, as that of an offset between two BatchNorms, moves by rounding
alone: two programs may differ there by `ROUNDING` of the largest movement of any weight.

With micro-batches of equal size the peers' mean of means is the mean over the full batch, so they
must agree. BatchNorm's statistics are among the weights.
"""

import dataclasses

import numpy as np

UPDATES = 2
LOSS_TOLERANCE = 1e-4
MOVEMENT_TOLERANCE = 3e-2
ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Where training went: the losses on the way, and every weight before and after, by
    position.
    """

    losses: list
    before: list
    after: list


def outcome_of_train_step(contestant, workload):
    before = contestant.model.get_weights()
    losses = [
        float(contestant.update(contestant.feed(stack))) for stack in workload.stacks(UPDATES)
    ]
    return Outcome(losses, before, contestant.model.get_weights())


def snapshot(trainer):
    """Returns a function that restores the model and the optimizer to what they are now."""
    # The optimizer's slots must exist to be saved.
    trainer.optimizer.build(trainer.model.trainable_variables)
    variables = [*trainer.model.variables, *trainer.optimizer.variables]
    before = [variable.numpy() for variable in variables]

    def restore():
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)

    return restore


def outcome_of_fit(contestant, workload):
    before = contestant.model.get_weights()
    losses = [float(contestant.epoch(*workload.arrays(UPDATES)))]
    return Outcome(losses, before, contestant.model.get_weights())


def assert_agree(ours, theirs, name, movement=MOVEMENT_TOLERANCE):
    """Fails with the worst weight if `theirs` trained differently from `ours`."""
    np.testing.assert_allclose(
        theirs.losses, ours.losses, rtol=LOSS_TOLERANCE, err_msg=f"losses of {name}"
    )
    rounding = ROUNDING * max(
        np.linalg.norm(a - start) for start, a in zip(ours.before, ours.after, strict=True)
    )
    for i, (start, a, b) in enumerate(zip(ours.before, ours.after, theirs.after, strict=True)):
        np.testing.assert_array_equal(
            theirs.before[i], start, err_msg=f"initial weight {i} of {name}"
        )
        moved, apart = np.linalg.norm(a - start), np.linalg.norm(a - b)
        assert apart <= movement * moved + rounding, (
            f"{name}: weight {i} {a.shape} moved {moved:.3g} in ours, and theirs is {apart:.3g} "
            "away"
        )
    assert not all(map(np.array_equal, ours.before, ours.after)), (
        "nothing moved, so this proves nothing"
    )
