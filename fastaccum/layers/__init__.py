"""Replaces methods of a model's layers: faster forms, fused attention, recomputed blocks."""
