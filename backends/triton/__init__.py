"""Triton kernels: one source for every GPU that Triton compiles for, and for its interpreter."""
