"""The GPU backend: streaming kernels in Triton; the only place that imports it.

`tile`, `lse`, `transport` and `hadamard` are device code; `configs` holds the tile choices as data,
`launch` is the only border between torch and the kernels, `aot` compiles ahead of time and reads the
machine code, `loads` counts the loads of interpreted kernels.
"""
