"""Measurements that need a GPU, in stages of minutes: kernels, every method, host memory, speed, overlap."""
