"""The demo page at `/`, which shows a completion round by round; it uses the server's public API."""

from pathlib import Path

from fastapi import FastAPI, Response

ASSETS = Path(__file__).parent / "assets"
FILES = {  # file name and media type by path
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
POLICY = {  # the page may load only its own files, and the icon that its HTML contains
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(
        f"{directive} {source}" for directive, source in POLICY.items()
    ),
    "Cache-Control": "no-cache",  # browsers show a new version of the package at the next visit
}


def add_demo_page(app: FastAPI) -> None:
    for path, (name, media_type) in FILES.items():
        _add_file(app, path, (ASSETS / name).read_bytes(), media_type)


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def read() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)
