"""Descriptions of a run that workers and checkpoints compare, alike in every process."""
