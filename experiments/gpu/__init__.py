"""What only a GPU can show, in stages of minutes: kernels, every method, host memory, speed, overlap."""
