"""The conformance suite, the exact probe, the self-test, kernels compiled ahead of time, GEMM timing."""
