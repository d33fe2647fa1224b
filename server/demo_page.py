"""The page at `/`: a completion, round by round. It asks the server like any other client."""

from pathlib import Path

from fastapi import APIRouter, Response

FILES = {  # path → where it lies, what it is
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
POLICY = {  # what the page may load: its own files, and an icon that is written in it
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
    "Content-Security-Policy": "; ".join(f"{what} {source}" for what, source in POLICY.items()),
    "Cache-Control": "no-cache",  # a new version of the package is seen at the next visit
}

router = APIRouter()


def _serve(path: str, name: str, media_type: str) -> None:
    """Adds a route that answers with the file as it is now."""
    content = (Path(__file__).parent / "assets" / name).read_bytes()

    async def read() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    router.add_api_route(path, read, include_in_schema=False)


for _path, (_name, _media_type) in FILES.items():
    _serve(_path, _name, _media_type)
