"""JAX building blocks: types, attention, rotary embeddings, memory kinds, meshes, kernels."""
