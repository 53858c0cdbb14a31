"""One train step: the fused cycle, what a model adds to it, and what guards it."""
