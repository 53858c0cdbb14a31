"""Traces functions of a batch, and reads in their graphs what they compute."""
