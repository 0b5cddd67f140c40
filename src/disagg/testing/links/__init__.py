"""Emulated links: two network namespaces of this machine and what lies between them. Needs root on Linux."""
