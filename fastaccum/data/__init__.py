"""Arrays, tf.data, PyDatasets and generators as stacks of micro-batches, and where a pass over them
stands.
"""
