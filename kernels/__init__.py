"""XLA building blocks of the train step."""
