"""Attributes of others' objects, types of arguments, and warnings: for every room above."""
