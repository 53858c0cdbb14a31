"""Commands, `python -m benchmarks.tools.NAME`, and the modules that write runs up."""
