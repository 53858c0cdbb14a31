"""Checks before any timing that the contestants compute the same thing.

After `UPDATES` updates from the same weights on the same data, losses agree to `LOSS_TOLERANCE`
(relative), and the final weights differ by at most `MOVEMENT_TOLERANCE` of the norm of their
movement. The second tolerance is the looser one. Adam divides by the gradient's own size, so
rounding decides where that is nearly 0. In the ConvNet, rounding switches ReLUs near 0, so float32
gradients are 0.3 % away from float64 ones in any program.

A weight whose gradient cancels, such as an offset between two BatchNorms, moves by rounding alone:
two programs may differ there by `ROUNDING` of the largest movement of any weight.

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
    """A short training: its losses, and every weight before and after.

    Args:
        losses: one for each update, or for each epoch.
        before: the initial weights as NumPy arrays, in the model's order.
        after: the final weights, in the same order.
    """

    losses: list
    before: list
    after: list


def outcome_of_train_step(contestant, workload):
    """Trains the contestant for `UPDATES` train steps and returns its `Outcome`."""
    before = contestant.model.get_weights()
    losses = []
    for stack in workload.stacks(UPDATES):
        loss = contestant.update(contestant.feed(stack))
        losses.append(float(loss))
    return Outcome(losses, before, contestant.model.get_weights())


def outcome_of_fit(contestant, workload):
    """Trains the contestant for one epoch of `UPDATES` updates and returns its `Outcome`."""
    before = contestant.model.get_weights()
    loss = contestant.epoch(*workload.arrays(UPDATES))
    return Outcome([float(loss)], before, contestant.model.get_weights())


def snapshot(trainer):
    """Returns a function that restores the model and the optimizer to their present values."""
    # The optimizer's slots must exist to be saved.
    trainer.optimizer.build(trainer.model.trainable_variables)
    variables = [*trainer.model.variables, *trainer.optimizer.variables]
    before = [variable.numpy() for variable in variables]

    def restore():
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)

    return restore


def assert_agree(ours, theirs, name, movement=MOVEMENT_TOLERANCE):
    """Fails with the first weight that differs if `theirs` trained differently from `ours`.

    Args:
        ours, theirs: an `Outcome` each.
        name: the peer's, for the message.
        movement: by how much of its movement a weight may differ.
    """
    np.testing.assert_allclose(
        theirs.losses, ours.losses, rtol=LOSS_TOLERANCE, err_msg=f"losses of {name}"
    )
    for i, (our_start, their_start) in enumerate(zip(ours.before, theirs.before, strict=True)):
        np.testing.assert_array_equal(
            their_start, our_start, err_msg=f"initial weight {i} of {name}"
        )
    movements = [
        np.linalg.norm(after - before)
        for before, after in zip(ours.before, ours.after, strict=True)
    ]
    rounding = ROUNDING * max(movements)
    weights = zip(movements, ours.after, theirs.after, strict=True)
    for i, (moved, our_weight, their_weight) in enumerate(weights):
        distance = np.linalg.norm(our_weight - their_weight)
        assert distance <= movement * moved + rounding, (
            f"{name}: weight {i} {our_weight.shape} moved {moved:.3g} in ours, and theirs is "
            f"{distance:.3g} away"
        )
    assert max(movements) > 0, "nothing moved, so this proves nothing"
