"""Compiles the kernels for a TPU or GPU that need not be there, and reports what the compilers say.

``python -m pallas_kernels.aot --target h200`` runs it. Every chip is compiled for in a process of its own, for a
compiler may abort. This needs libtpu (TPU) or JAX's CUDA plugin and ptxas (GPU), but neither chip nor driver.
"""
