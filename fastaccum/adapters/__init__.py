"""One interface to Keras 3, tf_keras and tensorflow-addons: what is private to Keras is named here
and nowhere else.
"""
