"""Times contestants in turns in one process, through pytest-benchmark."""

import collections
import time


def race(benchmark, ours, peers, rounds):
    """Times `ours` with pytest-benchmark and, in the same rounds, each of `peers`.

    A round calls every contestant once; the order of the peers rotates, so none has a fixed
    predecessor.

    Args:
        benchmark: pytest-benchmark's fixture.
        ours: called once a round and timed by the fixture.
        peers: `{name: callable}`, timed here with the same clock.
        rounds: how many; with `--benchmark-disable` one, and nothing is returned.

    Returns:
        `{name: [seconds, one per round]}`, ours under "ours"; None when benchmarks are disabled.
    """
    times = {name: [] for name in peers}
    order = collections.deque(peers)

    def time_the_peers():
        order.rotate(1)
        for name in order:
            start = time.perf_counter()
            peers[name]()
            times[name].append(time.perf_counter() - start)

    benchmark.pedantic(ours, setup=time_the_peers, rounds=rounds)
    if benchmark.disabled:
        return None
    return {"ours": list(benchmark.stats.stats.data), **times}
