"""Kernels in C++ for x86-64 CPUs: compiled once with the machine's own compiler, called with plain pointers."""
