"""The train step on the replicas of a tf.distribute strategy."""
