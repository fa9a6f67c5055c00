"""The page's files: types, caching, the content policy, and that nothing in them would breach it."""

from __future__ import annotations

import re

import pytest
from api_client import Api

from jaxpage.server import page

pytestmark = pytest.mark.anyio
TYPES = {
    "/": "text/html; charset=utf-8",
    "/page/app.js": "text/javascript; charset=utf-8",
    "/page/style.css": "text/css; charset=utf-8",
    "/page/favicon.svg": "image/svg+xml",
}
FILES = {
    path.name: path.read_text(encoding="utf-8") for path in page.FOLDER.iterdir() if path.suffix in page.MEDIA_TYPES
}


@pytest.mark.parametrize("path", TYPES)
async def test_files_and_their_headers(api, path):
    response = await api.client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == TYPES[path]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    assert response.text == FILES[path.removeprefix("/page/").lstrip("/") or "index.html"]
    assert (await api.client.head(path)).status_code == 200


@pytest.mark.parametrize("path", TYPES)
async def test_what_a_browser_has_is_not_sent_again(api, path):
    tag = (await api.client.get(path)).headers["etag"]
    for sent in (tag, f"W/{tag}", f'"other", {tag}'):
        response = await api.client.get(path, headers={"If-None-Match": sent})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", tag)
    assert (await api.client.get(path, headers={"If-None-Match": '"other"'})).status_code == 200


async def test_content_policy(api):
    policy = (await api.client.get("/")).headers["content-security-policy"]
    rules = dict(rule.split(maxsplit=1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["/page/", "/page/nothing.js", "/page/__init__.py", "/page/..%2Fapp.py", "/page/a/b"])
async def test_nothing_else_is_served(api, path):
    response = await api.client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "NotFoundError"


async def test_the_page_is_open_though_keys_are_set(engine):
    api = Api(engine, api_key=("one",))
    for path in TYPES:
        assert (await api.client.get(path)).status_code == 200


def test_the_page_loads_its_own_files_only():
    html = FILES["index.html"]
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert set(loaded) == {"page/app.js", "page/style.css", "page/favicon.svg"}, "relative: it works under a root path"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html), "inline code would be blocked"
    for name, text in FILES.items():
        urls = [url for url in re.findall(r"https?://[^\s\"')]+", text) if url != "http://www.w3.org/2000/svg"]
        assert not urls, f"{name} names {urls}"
        for imported in re.findall(r'from "([^"]+)"', text):
            assert imported.removeprefix("./") in FILES


def test_text_never_becomes_html():
    for name, text in FILES.items():
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", text), (
                name
            )
