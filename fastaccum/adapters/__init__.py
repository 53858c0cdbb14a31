"""One face for Keras's models, optimizers, losses, metrics and callbacks, in a train step."""
