"""The command line of dflash-serve; tests/server has the tests of the server."""

import pytest

from dflash_aot.bin import serve


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("DFLASH_API_KEY", raising=False)


INVALID_FLAGS = [
    (["--host=0.0.0.0"], "open to other machines, and no API key is set: set DFLASH_API_KEY"),
    (["--host=::"], "no API key is set"),
    (["--host=example"], "no API key is set"),
    (["--port=65536"], "port"),
    (["--api_keys=/none"], "/none, cannot be read: No such file"),
    (["--tls_key=key.pem"], "both are needed"),
    (["--tls_key=key.pem", "--tls_certificate=chain.pem"], "--tls_certificate chain.pem, --tls_key key.pem:"),
    (["--k=some"], "--k some: must be auto, or a whole number"),
    (['--speculative_config={"num_speculative_tokens": 7}', "--k=auto"], "--k auto: --speculative_config chooses K"),
    (['--speculative_config={"num_speculative_tokens_per_batch_size": [[2, 4, 7]]}'], "first range must start at 1"),
    (['--speculative_config={"model": "a"}', "--draft=b"], "--draft is b, the model of --speculative_config is a"),
    (["--request_seconds=nan"], "--request_seconds nan: a finite number is needed"),
    (["--drain_seconds=inf"], "drain_seconds"),
    (["--temperature=-1"], "--temperature -1.0: a number from 0 to 10000 is needed"),
    (["--served_model_name="], "--served_model_name '': a name is needed"),
    (["--draft=/somewhere"], "/somewhere: no such directory"),
    (["stray"], "all arguments are flags"),
]


def test_invalid_flags_are_refused_before_anything_is_opened(command):
    for arguments, words in INVALID_FLAGS:
        done = command(serve, *arguments)
        assert done.code == 2 and words in done.err and "listening" not in done.err


def test_short_key_and_unencrypted_network_are_warned_of(command, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("DFLASH_API_KEY", "short")
    done = command(serve, "--host=0.0.0.0", "--port=0", f"--bundle={tmp_path}")
    assert done.code == 2 and "there is no bundle" in done.err
    short, unencrypted = (record.getMessage() for record in caplog.records)
    assert "less than 16 characters" in short and "cross the network unencrypted" in unencrypted
