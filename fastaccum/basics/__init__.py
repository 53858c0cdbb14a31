"""Attributes of others' objects, types of arguments, warnings, and messages of processes."""
