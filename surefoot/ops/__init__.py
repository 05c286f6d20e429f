"""Kernels, each beside its plain-torch twin."""
