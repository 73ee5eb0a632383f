"""Hybrid mixture-of-experts models on the op library: configuration, weights, states, and the two forward passes."""
