"""Models and optimizers of tf_keras, tensorflow-addons and Hugging Face."""
