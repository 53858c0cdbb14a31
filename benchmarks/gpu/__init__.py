"""Fused step against PyTorch and JAX on a GPU; the machine of the GPU needs no TensorFlow."""
