"""Ray worker: what a process of a Ray cluster runs, which compiles one executable and returns its bytes.

A process compiles one executable only, for the reason given in `worker_process`.
"""

import msgspec

from dflash_aot.cache.environment import Environment, is_tpu_attached
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.topology import parse_topology
from dflash_aot.compile.pipeline.build_target import TargetDevices, attach_devices, describe_devices
from dflash_aot.compile.pipeline.executable_builder import (
    CompileJob,
    CompileResult,
    compile_executable,
    explain_failure,
    jax_cache_disabled,
)

REMEDY = (
    "Nodes that build need the versions and flags of the machine that starts the build, and for CPU executables its "
    "processor"
)


def describe_slice(topology: str) -> bytes:
    """The environment of a TPU slice as the compiler of this node describes it, as JSON."""
    return msgspec.json.encode(describe_devices(parse_topology(topology)).environment)


def compile_on_node(environment: bytes, job: bytes) -> tuple[bytes, bytes, bytes]:
    """A CompileResult as JSON, the packed executable and the packed program; both empty after a failure.

    Args:
        environment: of the devices to compile for, an Environment as JSON.
        job: a CompileJob as JSON.
    """
    wanted, asked = msgspec.json.decode(environment, type=Environment), msgspec.json.decode(job, type=CompileJob)
    try:
        with jax_cache_disabled():
            entry, executable, program, _ = compile_executable(_open_devices(wanted, asked), asked)
    except Exception as error:
        return msgspec.json.encode(CompileResult(None, explain_failure(error))), b"", b""
    return msgspec.json.encode(CompileResult(entry)), executable, program


def _open_devices(wanted: Environment, job: CompileJob) -> TargetDevices:
    """Raises BuildFailed where an executable from this node would not match its key."""
    if wanted.platform == "tpu" and is_tpu_attached():
        raise BuildFailed(f"{name_node()} has a TPU: slices can be described only where no TPU is attached")
    topology = parse_topology(wanted.topology) if wanted.platform == "tpu" else None
    devices = describe_devices(topology) if topology else attach_devices(wanted.platform, None, wanted.device_count)
    check_same(wanted, devices.environment, name_node())
    if executable_key(job.program, job.signature, devices.environment) != job.key:
        raise BuildFailed(f"{name_node()} has another version of dflash-aot, which would build another executable")
    return devices


def check_same(wanted: Environment, found: Environment, node: str) -> None:
    """Raises BuildFailed with every field of the environment that differs, and both values."""
    different = [
        _format_difference(field, getattr(wanted, field), getattr(found, field))
        for field in Environment.__struct_fields__
        if getattr(wanted, field) != getattr(found, field)
    ]
    if different:
        raise BuildFailed(f"{node} would build something else: {'; '.join(different)}. {REMEDY}")


def _format_difference(field: str, wanted: object, found: object) -> str:
    if isinstance(wanted, tuple) and isinstance(found, tuple):  # dozens of names, most of them in both
        wanted, found = (
            " ".join(one for one in ours if one not in theirs) for ours, theirs in ((wanted, found), (found, wanted))
        )
    return f"{field} {found or 'none'} there, {wanted or 'none'} here"


def name_node() -> str:
    """The node that this process runs on, as Ray's tools list it."""
    import ray  # noqa: PLC0415  see `ray_pool`

    return f"Ray's node {ray.util.get_node_ip_address()}"
