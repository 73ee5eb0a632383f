"""Ops that are finite by construction: a reference, a CPU path and Triton kernels that mark their own sensor words."""
