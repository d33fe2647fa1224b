"""What a process of a Ray cluster does: one executable, handed back as bytes. See `worker` for why only one."""

import msgspec

from dflash_aot.cache.environment import Environment, is_tpu_attached
from dflash_aot.cache.errors import BuildFailed
from dflash_aot.cache.key import executable_key
from dflash_aot.cache.topology import parse_topology
from dflash_aot.compile.pipeline.build_target import Machine, attach, describe
from dflash_aot.compile.pipeline.executable_builder import Order, explain, make_executable
from dflash_aot.compile.pipeline.worker_process import Answer

REMEDY = "Nodes that build need the versions and flags of the machine that starts the build, for CPU its processor too"


def describe_slice(topology: str) -> bytes:
    """The environment of a TPU slice as the compiler of a node describes it, as JSON."""
    return msgspec.json.encode(describe(parse_topology(topology)).environment)


def make_for(environment: bytes, order: bytes) -> tuple[bytes, bytes, bytes]:
    """An Answer as JSON, the packed executable and the packed program; empty where there is none."""
    wanted, asked = msgspec.json.decode(environment, type=Environment), msgspec.json.decode(order, type=Order)
    try:
        entry, executable, program = make_executable(_open_machine(wanted, asked), asked)
    except Exception as error:
        return msgspec.json.encode(Answer(None, explain(error))), b"", b""
    return msgspec.json.encode(Answer(entry)), executable, program


def _open_machine(wanted: Environment, order: Order) -> Machine:
    """Raises BuildFailed where what is made here would not be what its key says."""
    if wanted.platform == "tpu" and is_tpu_attached():
        raise BuildFailed(f"{name_node()} has a TPU: slices are described where none is attached")
    described = parse_topology(wanted.topology) if wanted.platform == "tpu" else None
    machine = describe(described) if described else attach(wanted.platform, None, wanted.device_count)
    check_same(wanted, machine.environment, name_node())
    if executable_key(order.program, order.signature, machine.environment) != order.key:
        raise BuildFailed(f"{name_node()} has another version of dflash-aot, by which it would be another executable")
    return machine


def check_same(wanted: Environment, found: Environment, node: str) -> None:
    """Executables are found by all of it. Raises BuildFailed with every difference, and both values."""
    different = [
        _tell_apart(field, getattr(wanted, field), getattr(found, field))
        for field in Environment.__struct_fields__
        if getattr(wanted, field) != getattr(found, field)
    ]
    if different:
        raise BuildFailed(f"{node} would build something else: {'; '.join(different)}. {REMEDY}")


def _tell_apart(field: str, wanted: object, found: object) -> str:
    if isinstance(wanted, tuple) and isinstance(found, tuple):  # of names, dozens that are the same
        wanted, found = (
            " ".join(one for one in ours if one not in theirs) for ours, theirs in ((wanted, found), (found, wanted))
        )
    return f"{field} {found or 'none'} there, {wanted or 'none'} here"


def name_node() -> str:
    """The node that this process is on, as Ray's tools list it."""
    import ray  # noqa: PLC0415  see `ray_cluster`

    return f"Ray's node {ray.util.get_node_ip_address()}"
