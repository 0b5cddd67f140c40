"""Copying and summing runs in C++ for x86-64 CPUs: compiled once with the machine's own compiler."""
