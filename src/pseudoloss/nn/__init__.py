"""Networks, layer operations, Triton kernels and views."""
