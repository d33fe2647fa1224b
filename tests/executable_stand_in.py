"""Stand-ins for serialized executables, which pass the pickle scan and cannot be loaded."""

import pickle
import struct


def make_stand_in(code: object) -> bytes:
    """Returns the pickle of an executable whose machine code is the pickle of an object, and that has no arrays."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    machine_code = pickle.dumps(code, protocol=4)
    executable = text("exec") + b"B" + struct.pack("<I", len(machine_code)) + machine_code + b"\x86Q"
    state = b"N}" + text("xla_executable") + executable + b"s\x86b"
    return (
        b"\x80\x04"
        + text("jax._src.interpreters.pxla")
        + text("UnloadedMeshExecutable")
        + b"\x93)\x81"
        + state
        + b"]\x89\x87."
    )
