"""The engine's GPU kernels, in Triton: one idea a file."""
