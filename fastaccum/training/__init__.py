"""The calls of a Trainer: the model and what trains it, its step, its data, and the loops of fit
and evaluate.
"""
