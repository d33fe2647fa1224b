"""dflash-serve: serves a bundle over HTTP, as OpenAI's interface has it.

dflash-serve --bundle DIR|URL [--host 127.0.0.1] [--port 8000] [--api_keys FILE] [--served_model_name NAME]
    [--target DIR --draft DIR] [--k auto|N] [--temperature T] [--[no]preload] [--require_signature PUBLIC.pem]
    [--max_waiting N] [--max_per_key N] [--max_body_bytes N] [--max_prompt_tokens N]
    [--request_seconds S] [--drain_seconds S] [--tls_certificate FILE --tls_key FILE] [--access_log]

DFLASH_API_KEY in the environment, or a file of keys, says who may ask; one of them is needed where the address is not
this machine's alone.
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

from dflash_aot.bin.command_line import run_command
from dflash_aot.bin.engine_flags import EngineFlags
from dflash_aot.cache.errors import BadInput
from dflash_aot.cache.locations import hide_secrets
from dflash_aot.runtime.engine import MAX_WAITING
from dflash_aot.runtime.metrics.process_clock import seconds_since_process_start
from dflash_aot.runtime.requests.sampling_params import LARGEST
from dflash_aot.server.api_keys import Keys, make_keys, read_keys
from dflash_aot.server.lifecycle import Observer, listen, serve
from dflash_aot.server.limits import Limits
from dflash_aot.server.middleware import LOOPBACK
from dflash_aot.server.served_model import Serving
from dflash_aot.server.server_state import Service

logger = logging.getLogger(__name__)
IMPORTED = seconds_since_process_start()
VARIABLE = "DFLASH_API_KEY"
SHORT = 16  # characters: who can try a thousand keys a second should not find one
DEFAULTS = Limits()
LONGEST = 1e6  # seconds

FLAGS = flags.FlagValues()
_SERVED = EngineFlags(FLAGS)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "the address to listen at; 0.0.0.0 and :: are all", flag_values=FLAGS)
_PORT = flags.DEFINE_integer("port", 8000, "0: any that is free", 0, 65535, flag_values=FLAGS)
_API_KEYS = flags.DEFINE_string(
    "api_keys", None, f"a file of API keys, one a line; {VARIABLE} may hold one more", flag_values=FLAGS
)
_NAME = flags.DEFINE_string(
    "served_model_name", None, "what clients call the model; default: the target's name", flag_values=FLAGS
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    None,
    "of requests that say none; default: 1, as OpenAI's; 0 where the bundle cannot sample",
    0.0,
    LARGEST,
    flag_values=FLAGS,
)
_PRELOAD = flags.DEFINE_bool(
    "preload",
    True,
    "load and call every executable before the server is ready; otherwise when it is needed",
    flag_values=FLAGS,
)
_MAX_WAITING = flags.DEFINE_integer(
    "max_waiting",
    MAX_WAITING,
    "choices in line behind those that are served; more are refused, also those of one request",
    1,
    flag_values=FLAGS,
)
_MAX_PER_KEY = flags.DEFINE_integer(
    "max_per_key",
    DEFAULTS.per_caller,
    "choices under way or in line for one API key, or for all callers where there are no keys",
    1,
    flag_values=FLAGS,
)
_MAX_BODY = flags.DEFINE_integer("max_body_bytes", DEFAULTS.body_bytes, "of one request's body", 1, flag_values=FLAGS)
_MAX_PROMPT = flags.DEFINE_integer(
    "max_prompt_tokens", None, "of one prompt; default: what the grid holds", 1, flag_values=FLAGS
)
_REQUEST_SECONDS = flags.DEFINE_float(
    "request_seconds", DEFAULTS.request_seconds, "how long one request may take", 0.001, LONGEST, flag_values=FLAGS
)
_DRAIN_SECONDS = flags.DEFINE_float(
    "drain_seconds",
    DEFAULTS.drain_seconds,
    "how long what is under way may go on after SIGTERM; then it ends as an error",
    0.0,
    LONGEST,
    flag_values=FLAGS,
)
_TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", None, "PEM, the chain: serve HTTPS", flag_values=FLAGS)
_TLS_KEY = flags.DEFINE_string("tls_key", None, "PEM, its private key", flag_values=FLAGS)
_ACCESS_LOG = flags.DEFINE_bool("access_log", False, "a line for each request, without its texts", flag_values=FLAGS)


def main() -> None:
    """The console script."""
    sys.exit(run_command("dflash-serve", __doc__, FLAGS, run))


def run() -> None:
    """Checks what is said before anything is opened, and serves."""
    _check_numbers()
    keys = _read_keys()
    local = _is_loopback(_HOST.value)
    if not (keys or local):
        raise BadInput(
            f"--host {_HOST.value} is open to other machines, and no API key is asked for: set {VARIABLE}, or give a "
            "file of keys with --api_keys"
        )
    tls = _read_tls()
    if not (local or tls):
        logger.warning("keys and texts cross the network as they are: give --tls_certificate, or put a proxy before it")
    service = Service(_describe_serving(), _read_limits(), keys)
    _calm_logs(_ACCESS_LOG.value)
    with listen(_HOST.value, _PORT.value) as listener:
        url = f"{'https' if tls else 'http'}://{_show_address(listener.getsockname())}"
        hosts = None if keys else LOOPBACK | {_HOST.value.lower()}
        serve(service, listener, hosts, tls, _Announcer(service, url))
    _say("ended, and everything that was under way was told")


class _Announcer(Observer):
    """To standard error."""

    def __init__(self, service: Service, url: str):
        self._service, self._url = service, url

    def note_listening(self) -> None:
        callers, bundle = _describe_callers(self._service.keys), hide_secrets(self._service.serving.bundle)
        _say(f"listening at {self._url} ({callers}); opening {bundle}")

    def note_phase(self, phase: str) -> None:
        _say(f"{phase} ...")

    def note_ready(self) -> None:
        gc.freeze()  # of what comes with JAX nothing is ever garbage, and looking through it stalls everything
        assert self._service.opened
        startup = {"imports": IMPORTED, **self._service.opened.engine.startup}
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in startup.items())
        took = seconds_since_process_start()
        _say(f"ready after {took:.2f} s ({phases}): {self._service.opened.name} at {self._url}/v1")


def _check_numbers() -> None:
    """What absl's bounds let pass. Raises BadInput."""
    for flag in ("request_seconds", "drain_seconds", "temperature"):
        if (value := FLAGS[flag].value) is not None and not math.isfinite(value):
            raise BadInput(f"--{flag} {value}: a number is needed")
    if _NAME.value == "":
        raise BadInput("--served_model_name '': a name is needed")


def _read_keys() -> Keys:
    """Of the environment and the file. Raises BadInput."""
    given, sources = [], []
    if (value := os.environ.get(VARIABLE)) is not None:
        given.append(value)
        sources.append(VARIABLE)
    if _API_KEYS.value is not None:
        given += read_keys(Path(_API_KEYS.value))
        sources.append(f"--api_keys {_API_KEYS.value}")
    keys = make_keys(given, " and ".join(sources))
    if any(len(key) < SHORT for key in given):
        logger.warning("an API key has less than %d characters: make one with: openssl rand -hex 32", SHORT)
    return keys


def _is_loopback(host: str) -> bool:
    """A name may lead anywhere, but for the one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _read_tls() -> tuple[Path, Path] | None:
    """Raises BadInput."""
    certificate, key = _TLS_CERTIFICATE.value, _TLS_KEY.value
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise BadInput("--tls_certificate and --tls_key: both are needed")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise BadInput(f"--tls_certificate {certificate}, --tls_key {key}: {error}") from error
    return Path(certificate), Path(key)


def _describe_serving() -> Serving:
    return Serving(
        bundle=_SERVED.bundle,
        target=_SERVED.target,
        draft=_SERVED.draft,
        k=_SERVED.k,
        max_waiting=_MAX_WAITING.value,
        require_signature=_SERVED.signed_by,
        preload=_PRELOAD.value,
        name=_NAME.value,
        temperature=_TEMPERATURE.value,
        prompt_tokens=_MAX_PROMPT.value,
    )


def _read_limits() -> Limits:
    return Limits(
        body_bytes=_MAX_BODY.value,
        per_caller=_MAX_PER_KEY.value,
        request_seconds=_REQUEST_SECONDS.value,
        drain_seconds=_DRAIN_SECONDS.value,
    )


def _describe_callers(keys: Keys) -> str:
    return f"{len(keys.digests)} API key{'s' * (len(keys.digests) > 1)}" if keys else "no API keys, this machine only"


def _show_address(address: tuple[object, ...]) -> str:
    host, port, *_ = address
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _calm_logs(access: bool) -> None:
    """Lines for people: a trace of Python's says nothing to them."""

    def drop_trace(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None and record.levelno > logging.DEBUG:
            record.msg = f"{record.getMessage().strip()}: {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            record.args, record.exc_info = (), None
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(drop_trace)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # below, anybody who connects may make it say things
    logging.getLogger("dflash_aot.server.access").setLevel(logging.INFO if access else logging.WARNING)


def _say(line: str) -> None:
    print(f"dflash-serve: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
