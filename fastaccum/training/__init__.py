"""The calls of a Trainer: its model, step and data, and the loops of fit and evaluate."""
