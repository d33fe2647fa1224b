"""dflash-serve: serves a bundle over HTTP with an OpenAI-compatible API.

dflash-serve --bundle DIR|URL [--host 127.0.0.1] [--port 8000] [--api_keys FILE] [--served_model_name NAME]
    [--target DIR --draft DIR] [--k auto|N] [--speculative_config JSON] [--temperature T] [--[no]preload]
    [--require_signature PUBLIC.pem] [--[no]prefix_caching] [--kv_offloading_size GIB] [--prefix_salt key|none]
    [--max_waiting N] [--max_per_key N] [--max_body_bytes N] [--max_prompt_tokens N] [--request_seconds S]
    [--drain_seconds S] [--tls_certificate FILE --tls_key FILE] [--access_log]
    [--hosts N --host_rank I --leader HOST:PORT]

API keys come from DFLASH_API_KEY in the environment and from a file. A key is required unless the server listens on a
loopback address.
"""

import gc
import ipaddress
import logging
import math
import os
import ssl
import sys
from pathlib import Path

from absl import flags

from dflash_aot.bin.command_line import (
    name_phase,
    print_lines,
    run_command,
    seconds_since_process_start,
)
from dflash_aot.bin.engine_flags import EngineFlags, leave
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.files.locations import hide_secrets
from dflash_aot.runtime.engine import MAX_WAITING
from dflash_aot.runtime.requests.sampling_params import PARAMETERS
from dflash_aot.server.lifecycle import LifecycleObserver, listen, serve
from dflash_aot.server.limits import (
    ApiKeys,
    ServerLimits,
    default_choices,
    make_keys,
    read_keys,
)
from dflash_aot.server.middleware import LOOPBACK
from dflash_aot.server.served_model import ServerState, ServingConfig

logger = logging.getLogger(__name__)
VARIABLE = "DFLASH_API_KEY"
SHORT_KEY_CHARACTERS = 16  # a shorter key could be found by trying a thousand keys per second
DEFAULTS = ServerLimits()
MAX_SECONDS = 1e6

FLAGS = flags.FlagValues()
_SERVED = EngineFlags(FLAGS)
_HOST = flags.DEFINE_string(
    "host",
    "127.0.0.1",
    "the address to listen on; 0.0.0.0 or :: for all addresses",
    flag_values=FLAGS,
)
_PORT = flags.DEFINE_integer(
    "port", 8000, "the port to listen on; 0 for any free port", 0, 65535, flag_values=FLAGS
)
_API_KEYS = flags.DEFINE_string(
    "api_keys",
    None,
    f"a file of API keys, one per line; {VARIABLE} may hold another key",
    flag_values=FLAGS,
)
_NAME = flags.DEFINE_string(
    "served_model_name",
    None,
    "the model's name for clients; default: the target's name",
    flag_values=FLAGS,
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    None,
    "temperature of requests that give none; default: 1, or 0 if the bundle cannot sample",
    flag_values=FLAGS,
)
_PRELOAD = flags.DEFINE_bool(
    "preload",
    True,
    "load and call every executable before the server is ready; otherwise at its first use",
    flag_values=FLAGS,
)
_PREFIX_CACHING = flags.DEFINE_bool(
    "prefix_caching",
    True,
    "use the kv of prompts that were seen before, also those of other requests without a cache_salt",
    flag_values=FLAGS,
)
_KV_OFFLOADING_SIZE = flags.DEFINE_float(
    "kv_offloading_size",
    0.0,
    "GiB of host memory for kv that the device evicts; needs a grid with offload=1",
    0.0,
    flag_values=FLAGS,
)
_PREFIX_SALT = flags.DEFINE_enum(
    "prefix_salt",
    "key",
    ["key", "none"],
    "key: only requests of the same API key share kv; none: requests of all keys do",
    flag_values=FLAGS,
)
_MAX_WAITING = flags.DEFINE_integer(
    "max_waiting",
    MAX_WAITING,
    "size of the request queue, in choices; a request is refused if its choices do not all fit",
    1,
    flag_values=FLAGS,
)
_MAX_PER_KEY = flags.DEFINE_integer(
    "max_per_key",
    None,
    f"choices running or waiting for one API key; default: {DEFAULTS.choices_per_key}, and with one key or none only "
    "what the slots and the queue hold",
    1,
    flag_values=FLAGS,
)
_MAX_BODY = flags.DEFINE_integer(
    "max_body_bytes", DEFAULTS.body_bytes, "size limit of a request's body", 1, flag_values=FLAGS
)
_MAX_PROMPT = flags.DEFINE_integer(
    "max_prompt_tokens",
    None,
    "length limit of one prompt; default: what the grid holds",
    1,
    flag_values=FLAGS,
)
_REQUEST_SECONDS = flags.DEFINE_float(
    "request_seconds",
    DEFAULTS.request_seconds,
    "time limit of one request",
    0.001,
    MAX_SECONDS,
    flag_values=FLAGS,
)
_DRAIN_SECONDS = flags.DEFINE_float(
    "drain_seconds",
    DEFAULTS.drain_seconds,
    "time for open requests after SIGTERM; then they end with an error",
    0.0,
    MAX_SECONDS,
    flag_values=FLAGS,
)
_TLS_CERTIFICATE = flags.DEFINE_string(
    "tls_certificate", None, "a PEM file with the certificate chain: serve HTTPS", flag_values=FLAGS
)
_TLS_KEY = flags.DEFINE_string(
    "tls_key", None, "a PEM file with the certificate's private key", flag_values=FLAGS
)
_ACCESS_LOG = flags.DEFINE_bool(
    "access_log",
    False,
    "log a line for each request, without prompts and outputs",
    flag_values=FLAGS,
)


def main() -> None:
    """The console script."""
    leave(run_command("dflash-serve", __doc__, FLAGS, run))


def run() -> None:
    """Checks all flags before anything is opened, and serves."""
    import_seconds = seconds_since_process_start()
    _check_values()
    keys = _read_keys()
    is_local = _is_loopback(_HOST.value)
    if not (keys or is_local):
        raise BadInput(
            f"--host {_HOST.value} is open to other machines, and no API key is set: set {VARIABLE}, or give a file "
            "of keys with --api_keys"
        )
    tls = _read_tls()
    if not (is_local or tls):
        logger.warning(
            "keys and texts cross the network unencrypted: give --tls_certificate, or use a TLS proxy"
        )
    state = ServerState(_read_config(), _read_limits(keys), keys)
    _configure_logs(_ACCESS_LOG.value)
    if _SERVED.join_hosts():
        return
    with listen(_HOST.value, _PORT.value) as listener:
        url = f"{'https' if tls else 'http'}://{_format_address(listener.getsockname())}"
        hosts = None if keys else LOOPBACK | {_HOST.value.lower()}
        serve(state, listener, hosts, tls, _Announcer(state, url, import_seconds))
    _print("stopped; all open requests have ended")


class _Announcer(LifecycleObserver):
    """Reports the start of the server on standard error."""

    def __init__(self, state: ServerState, url: str, import_seconds: float):
        self._state = state
        self._url = url
        self._import_seconds = import_seconds

    def on_listening(self) -> None:
        keys = _format_key_count(self._state.keys)
        bundle = hide_secrets(self._state.config.bundle)
        _print(f"listening at {self._url} ({keys}); opening {bundle}")

    def on_phase(self, phase: str) -> None:
        _print(f"{name_phase(phase)} ...")

    def on_ready(self) -> None:
        gc.freeze()  # JAX's objects are never garbage, and each full collection would traverse them
        assert self._state.opened
        engine = self._state.opened.engine
        _print(f"tokens that end an answer: {engine.end_tokens}")
        startup = {"imports": self._import_seconds, **engine.startup}
        phases = ", ".join(
            f"{name_phase(name)} {seconds:.2f} s" for name, seconds in startup.items()
        )
        engine = self._state.opened.engine
        checkpoints = ", ".join(f"{role} {path}" for role, path in engine.checkpoints.items())
        _print(f"weights {engine.weights}: {checkpoints}")
        total = seconds_since_process_start()
        _print(f"ready after {total:.2f} s ({phases}): {self._state.opened.name} at {self._url}/v1")


def _check_values() -> None:
    """Raises BadInput for values that absl's bounds accept."""
    for flag in (_REQUEST_SECONDS, _DRAIN_SECONDS):
        if not math.isfinite(flag.value):
            raise BadInput(f"--{flag.name} {flag.value}: a finite number is needed")
    temperature = PARAMETERS["temperature"]
    if _TEMPERATURE.value is not None and not temperature.accepts(_TEMPERATURE.value):
        raise BadInput(f"--temperature {_TEMPERATURE.value}: {temperature.needed} is needed")
    if _NAME.value == "":
        raise BadInput("--served_model_name '': a name is needed")


def _read_keys() -> ApiKeys:
    """The keys of the environment and the file. Raises BadInput."""
    given = []
    sources = []
    if (value := os.environ.get(VARIABLE)) is not None:
        given.append(value)
        sources.append(VARIABLE)
    if _API_KEYS.value is not None:
        given += read_keys(Path(_API_KEYS.value))
        sources.append(f"--api_keys {_API_KEYS.value}")
    keys = make_keys(given, " and ".join(sources), _PREFIX_SALT.value == "key")
    if any(len(key) < SHORT_KEY_CHARACTERS for key in given):
        logger.warning(
            "an API key has less than %d characters: create one with: openssl rand -hex 32",
            SHORT_KEY_CHARACTERS,
        )
    return keys


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. Names other than localhost may resolve to any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _read_tls() -> tuple[Path, Path] | None:
    """The files of the certificate chain and its key. Raises BadInput if they do not fit together."""
    certificate = _TLS_CERTIFICATE.value
    key = _TLS_KEY.value
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise BadInput("--tls_certificate and --tls_key: both are needed")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"--tls_certificate {certificate}, --tls_key {key}: {error}") from error
    return Path(certificate), Path(key)


def _read_config() -> ServingConfig:
    return ServingConfig(
        bundle=_SERVED.bundle,
        target=_SERVED.target,
        draft=_SERVED.draft,
        k=_SERVED.k,
        max_waiting=_MAX_WAITING.value,
        require_signature=_SERVED.signed_by,
        preload=_PRELOAD.value,
        prefix_caching=_PREFIX_CACHING.value,
        kv_offloading_size=_KV_OFFLOADING_SIZE.value,
        name=_NAME.value,
        temperature=_TEMPERATURE.value,
        prompt_tokens=_MAX_PROMPT.value,
    )


def _read_limits(keys: ApiKeys) -> ServerLimits:
    return ServerLimits(
        body_bytes=_MAX_BODY.value,
        choices_per_key=_MAX_PER_KEY.value or default_choices(keys),
        request_seconds=_REQUEST_SECONDS.value,
        drain_seconds=_DRAIN_SECONDS.value,
    )


def _format_key_count(keys: ApiKeys) -> str:
    return (
        f"{len(keys.digests)} API key{'s' * (len(keys.digests) > 1)}"
        if keys
        else "no API keys, this machine only"
    )


def _format_address(address: tuple[object, ...]) -> str:
    host, port, *_ = address
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _configure_logs(access: bool) -> None:
    """Sets levels, and replaces tracebacks by their last line."""

    def drop_traceback(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None and record.levelno > logging.DEBUG:
            record.msg = f"{record.getMessage().strip()}: {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            record.args = ()
            record.exc_info = None
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(drop_traceback)
    # Clients can cause messages of lower levels.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    logging.getLogger("dflash_aot.server.access").setLevel(
        logging.INFO if access else logging.WARNING
    )


def _print(line: str) -> None:
    print_lines(f"dflash-serve: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
