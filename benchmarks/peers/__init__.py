"""Peers: each file is one usual way to accumulate gradients, written as its users write it."""
