"""Interleaved timing in one process, through pytest-benchmark."""

import collections
import time


def race(benchmark, ours, others, rounds):
    """Times `ours` with pytest-benchmark and, in the same rounds, each of `others`.

    A round calls every contestant once; the order of the others rotates, so none has a fixed
    predecessor.

    Args:
        benchmark: pytest-benchmark's fixture.
        ours: called once a round and timed by the fixture.
        others: `{name: callable}`, timed here with the same clock.
        rounds: how many; with `--benchmark-disable` one, and nothing is returned.

    Returns:
        `{name: [seconds, one per round]}`, ours under "ours"; None when benchmarks are disabled.
    """
    times = {name: [] for name in others}
    order = collections.deque(others)

    def time_the_others():
        order.rotate(1)
        for name in order:
            start = time.perf_counter()
            others[name]()
            times[name].append(time.perf_counter() - start)

    benchmark.pedantic(ours, setup=time_the_others, rounds=rounds)
    if benchmark.disabled:
        return None
    return {"ours": list(benchmark.stats.stats.data), **times}
