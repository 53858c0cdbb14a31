"""SIGKILL at random moments, during saves too: whatever a process was doing, another goes on
bit-identically.
"""

import functools
import json
import random
import signal

import killed
import pytest

from fastaccum.checkpoint import store

pytestmark = [pytest.mark.long, pytest.mark.slow]

KILLS_OF_A_TRAINING = 5
# Within a save, in the order in which they come: the hidden folder, the files read back and
# flushed, the checkpoint in place, an older one out of sight, its files gone.
WITHIN_SAVES = ("os.mkdir", "open", "os.rename", "shutil.rmtree", "os.remove")


def process(context, *arguments, **options):
    begun = context.Event()
    child = context.Process(target=killed.train, args=(*arguments, begun), kwargs=options)
    child.start()
    return child, begun


@pytest.fixture(scope="module")
def uninterrupted(context, tmp_path_factory):
    @functools.cache
    def train(kind):
        result = tmp_path_factory.mktemp("whole") / kind
        child, _ = process(context, None, kind, result=result)
        child.join()
        return json.loads(result.read_text())

    return train


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        pytest.param(seed, kind, marks=pytest.mark.sample if seed == 1 else (), id=f"{seed}-{kind}")
        for seed, kind in enumerate(["arrays", "dataset", "arrays", "dataset", "arrays", "shares"])
    ],
)
def test_kill_at_random_moments(context, uninterrupted, tmp_path, seed, kind):
    """Five kills of one training, each followed by a new process; 30 in all, 12 of them certain to
    be within a save.
    """
    moments, folder = random.Random(seed), tmp_path / "checkpoints"
    within = set(moments.sample(range(KILLS_OF_A_TRAINING), 2))
    steps = []
    for kill in range(KILLS_OF_A_TRAINING):
        if kill in within:
            count = moments.randint(3, 12)  # the first come before the first save
            child, _ = process(
                context, folder, kind, kill=(WITHIN_SAVES[(2 * seed + kill) % 5], count)
            )
        else:
            child, begun = process(context, folder, kind)
            assert begun.wait(120)
            child.join(moments.uniform(0, 0.15))
            child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        last = store.latest(folder)  # with no warning: a kill damages nothing
        steps.append(last.step if last else 0)
    child, _ = process(context, folder, kind, result=tmp_path / "result")
    child.join()
    assert json.loads((tmp_path / "result").read_text()) == uninterrupted(kind)
    assert 0 < steps[-1] < killed.STEPS
    assert steps == sorted(steps)
    assert not [each.name for each in folder.iterdir() if each.name.startswith(".step-")]
