"""GPU behaviour without a GPU: torch's own CUDA code on a pretended driver, whose kernels are computed by the CPU."""
