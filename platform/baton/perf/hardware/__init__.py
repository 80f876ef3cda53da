"""Accelerators, from their data sheets, and the efficiency of kernels."""
