"""Memory and time of training, measured and predicted: `python -m benchmarks.memory NAME`."""
