"""Modules that several suites and tools share: models, contestants, races and agreement."""
