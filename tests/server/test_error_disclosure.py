"""Which messages reach clients."""

from dflash_aot.cache.errors import BadCheckpoint, BadInput
from dflash_aot.server.api_errors import to_api_error


def test_message_about_a_file_of_the_server_is_not_sent():
    error = to_api_error(BadCheckpoint("/models/tokenizer.json fails at a text"), "1")
    assert error.status == 500 and "/models" not in error.message
    error = to_api_error(BadInput("top_k is -1"), "1")
    assert (error.status, error.message) == (400, "top_k is -1")
