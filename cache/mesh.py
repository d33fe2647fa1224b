"""Devices in a row, and how arrays lie on them: tensor parallelism has one axis."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from dflash_aot.cache.signature import MESH_AXIS, MeshAxes


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """The devices, in this order, along the one axis there is."""
    return Mesh(np.array(devices), (MESH_AXIS,))


def make_sharding(sharding: MeshAxes, devices: Sequence[jax.Device]) -> Sharding:
    """Where an array of this sharding lies. On one device nothing is split: JAX dispatches that faster."""
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0])
    return NamedSharding(make_mesh(devices), PartitionSpec(*sharding))
