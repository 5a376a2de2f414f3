"""Compile the attention's Pallas kernels for a TPU v6e without one (`make tpu-aot`).

Needs the compiler that `pip install "jax[tpu]==0.10.2"` brings (libtpu, about 700 MB; no dependency of ours).
Compiles forward and gradient for one chip, and the gradient over eight chips by `shard_map`. This shows that
the kernels compile and fit into the chip's memory; it does not run them. Temporaries of 0 MiB are all in
on-chip memory.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

LENGTHS = ((512, 32), (8192, 64))
TOPOLOGY = "v6e:2x4"


def devices() -> Any:
    """The devices of the topology, described without hardware.

    Raises:
        SystemExit: libtpu is not installed.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise SystemExit(f'no TPU compiler: pip install "jax[tpu]==0.10.2" ({error})') from error


def gradient(bandwidth: int) -> Any:
    """Output and gradients of one attention call on compiled kernels."""
    import jax

    from ot_newton.attention import sinkhorn_attention

    def run(q: Any, k: Any, v: Any, bar: Any) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            return sinkhorn_attention(q, k, v, bandwidth=bandwidth, backend="pallas", interpret=False)

        output, pull = jax.vjp(call, q, k, v)
        return output, pull(bar)

    return run


def main() -> int:
    """Compile every case; print time and memory."""
    chips = devices()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
    from jax.sharding import PartitionSpec as Spec

    mesh = Mesh(np.array(chips), ("data",))
    write = sys.stdout.write
    for length, bandwidth in LENGTHS:
        for where, batch in (("one chip", 1), ("eight chips", 8)):
            run, sharding = gradient(bandwidth), SingleDeviceSharding(chips[0])
            if batch == 8:
                spec = Spec("data")
                run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
                sharding = NamedSharding(mesh, spec)
            x = jax.ShapeDtypeStruct((batch, 2, length, 64), jnp.float32, sharding=sharding)
            begin = time.perf_counter()
            program = jax.jit(run).lower(x, x, x, x).compile()
            memory = program.memory_analysis().temp_size_in_bytes / 2**20
            seconds = time.perf_counter() - begin
            write(
                f"L={length} W={bandwidth} {where}: compiled in {seconds:.1f} s, {memory:.1f} MiB temporary\n"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
