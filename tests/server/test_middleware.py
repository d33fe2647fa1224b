"""Middleware of a running server: API keys, Host header, content type, headers, TLS."""

import datetime
import ipaddress
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.server.conftest import KEY, PATIENCE, Server
from tests.server.raw_client import RawClient, read_error

FILE_KEY = "sk-another-key-from-a-file"
UNKNOWN_KEY = "sk-this-key-is-not-in-any-list"
OPEN_PATHS = ("/", "/page.js", "/page.css", "/health", "/openapi.json")
BODY = {"prompt": "import os", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def keyed_server(bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key from the environment, a key from a file, and an access log."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# a comment\n{FILE_KEY}\n")
    server = Server.start(
        bundle("served"), f"--api_keys={file}", "--access_log", "--host=0.0.0.0", key=KEY
    ).wait_until_ready()
    assert server.url.startswith("http://0.0.0.0:")  # with keys any Host header is accepted
    yield server
    with server.client(FILE_KEY) as client:
        assert client.get("/x%0aforged%1b[2J").status_code == 404
    assert server.stop() == 0
    log = "".join(server.lines)
    assert "2 API keys" in log and "keys and texts cross the network unencrypted" in log
    assert "GET /x%0Aforged%1B%5B2J key 2 404" in log
    for secret in (KEY, FILE_KEY, UNKNOWN_KEY, "Traceback"):
        assert secret not in log


def test_keys_of_environment_and_file_are_accepted(keyed_server):
    for key in (KEY, FILE_KEY):
        with keyed_server.client(key) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 200
            assert client.get("/v1/models").status_code == 200
            assert client.get("/metrics").status_code == 200


def test_unknown_key_is_refused_in_openai_form(keyed_server):
    with keyed_server.client() as client:
        for header in ("", f"Bearer {UNKNOWN_KEY}", f"Bearer {KEY[:-1]}", f"Basic {KEY}", b"Bearer \xff\xfe"):
            response = client.post("/v1/completions", json=BODY, headers={"authorization": header})
            fault = "the API key is unknown" if header else "an API key is needed"
            assert read_error(response, 401, "invalid_api_key") == f"{fault}: Authorization: Bearer KEY"
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        assert client.get(f"/v1/models?api_key={KEY}", headers={"x-api-key": KEY}).status_code == 401
        assert client.get("/v1/models", headers={"cookie": f"authorization=Bearer {KEY}"}).status_code == 401


def test_open_paths_need_no_key_and_refuse_post(keyed_server):
    with keyed_server.client() as client:
        for path in OPEN_PATHS:
            assert client.get(path).status_code == 200
            refused = client.post(path, content=b" " * 100, headers={"content-type": "application/json"})
            assert read_error(refused, 405, None) == f"{path} does not accept POST"
            assert refused.headers["connection"] == "close"
        assert client.head("/health").status_code == 200


def test_all_other_paths_need_a_key(keyed_server):
    with keyed_server.client() as client:
        published = client.get("/openapi.json").json()["paths"]
        keyed = [path.replace("{model}", "embedded") for path in published if path not in OPEN_PATHS]
        assert len(keyed) == 8
        for path in (*keyed, "/metrics", "/nothing", "/docs", "/redoc", "/page", "/page/index.html"):
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"):
                assert client.request(method, path).status_code == 401, (method, path)


SIMILAR_PATHS = (
    *("/health/", "//health", "/HEALTH", "/./health", "/health%2f", "/health;x", "/v1/../health", "/page.js%00", "*"),
    *("/page.js/../../v1/models", "http://localhost/v1/models", "/v1/models?/health", "/v1/models#/health"),
)


def test_path_similar_to_an_open_path_needs_a_key(keyed_server):
    for path in SIMILAR_PATHS:
        with RawClient(keyed_server) as client:
            client.ask("GET", path)
            assert client.read_response().status == 401, path


# -- without keys: protection from pages of other sites in a browser


def test_without_keys_only_loopback_hosts_are_accepted(served):
    with served.client() as client:
        for host in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
        foreign = ("rebound.example", "localhost.rebound.example", "127.0.0.1.rebound.example:80", "127.0.0.1@x")
        for host in (*foreign, "[::2]", ""):
            refused = [client.get(path, headers={"host": host}) for path in ("/", "/health", "/v1/models")]
            refused.append(client.post("/v1/completions", json=BODY, headers={"host": host}))
            for response in refused:
                assert "answers to its own address only" in read_error(response, 403, "wrong_host")


def test_request_without_a_host_header_is_refused(served):
    with RawClient(served) as client:
        client.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert client.read_response().status == 403


def test_content_type_must_be_json(served):
    path, body = "/v1/completions", b'{"prompt": "a", "max_tokens": 1}'
    form = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
    with served.client() as client:
        for kind in ("text/plain", *form, "text/json", "", None):
            headers = {"origin": "http://evil.example"} | ({} if kind is None else {"content-type": kind})
            for refusing in (path, "/v1/chat/completions"):
                response = client.post(refusing, content=body, headers=headers)
                message = read_error(response, 415, "unsupported_media_type")
                assert message == "content-type: application/json is needed"
        headers = {"content-type": "Application/JSON; charset=utf-8"}
        assert client.post(path, content=body, headers=headers).status_code == 200


def test_cross_origin_requests_are_not_allowed(served):
    preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    with served.client() as client:
        for path in (*OPEN_PATHS, "/v1/models", "/v1/completions", "/metrics"):
            refused = client.options(path, headers=preflight)
            assert refused.status_code == 405
            for response in (refused, client.get(path, headers=preflight), client.head(path)):
                assert not [name for name in response.headers if name.startswith("access-control")]
                assert response.headers["x-content-type-options"] == "nosniff"
                assert "server" not in response.headers


# -- TLS


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    key, now = generate_private_key(SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dflash-aot tests")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    day = datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    signed = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    paths = tmp_path / "certificate.pem", tmp_path / "key.pem"
    paths[0].write_bytes(signed.public_bytes(Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return paths


def test_https_is_served_with_the_given_certificate(start_server, certificate):
    path, key = certificate
    server = start_server(f"--tls_certificate={path}", f"--tls_key={key}", key=KEY).wait_until_ready()
    assert server.url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=path), timeout=PATIENCE) as client:
        assert client.get("/v1/models").status_code == 401
        client.headers["authorization"] = f"Bearer {KEY}"
        assert client.post("/v1/completions", json=BODY).status_code == 200
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            assert [*response.iter_lines()][-2] == "data: [DONE]"
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{server.url}/health".replace("https", "http"))
    assert httpx.get(f"{server.url}/health", verify=ssl.create_default_context(cafile=path)).status_code == 200
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines) and "cross the network" not in "".join(server.lines)
