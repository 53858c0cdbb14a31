"""Arrays, tf.data, PyDatasets and generators as stacks of micro-batches, and the place in them."""
