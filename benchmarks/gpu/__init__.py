"""The fused step against PyTorch and JAX on a GPU: exported where TensorFlow is, run where it need
not be.
"""
