"""Places that a user names: directories, and URLs that fsspec knows; and how a place is shown to people."""

import re

URL = re.compile(r"[a-z][a-z0-9+.-]*(://|::)", re.ASCII | re.IGNORECASE)
USER = re.compile(r"([a-z0-9+.-]+)://([^/\s]*)@", re.ASCII | re.IGNORECASE)
QUERY = re.compile(r"(://[^\s?]*)\?[^\s'\")]*")
AZURE = ("abfs", "abfss", "az")  # abfs://container@account/path: what stands before the @ is no secret


def is_url(place: str) -> bool:
    """Whether it is not just a path."""
    return URL.match(place) is not None


def hide_secrets(text: str) -> str:
    """A URL, or a text with URLs in it, without their users and passwords, and without queries, which may sign them."""
    return QUERY.sub(r"\1", USER.sub(_drop_user, text))


def _drop_user(found: re.Match[str]) -> str:
    scheme, user = found.groups()
    kept = f"{user}@" if scheme.lower() in AZURE and ":" not in user else ""
    return f"{scheme}://{kept}"
