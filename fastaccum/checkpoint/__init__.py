"""Checkpoints of a fit: written whole or not at all, found again, and resumed bit-identically."""

from fastaccum.checkpoint.store import Checkpoint as Checkpoint
from fastaccum.checkpoint.store import latest as latest
