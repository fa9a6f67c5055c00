"""The page and a server that asks for a key, has no chat template, dies, or comes back; and small screens."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import ENTER, Browser
from page_server import Server

KEY = "schlüssel"


@pytest.fixture(scope="module")
def other_server(browser: Browser, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Wants a key; its model is a base model, without a chat template."""
    base = tmp_path_factory.mktemp("page") / "base"
    shutil.copytree(model, base, ignore=shutil.ignore_patterns("chat_template.jinja"))
    server = Server(base, "--api-key", KEY)
    yield server
    server.kill()


def test_key_base_model_loss_and_return(browser: Browser, other_server: Server) -> None:
    browser.resize(1280, 800)
    browser.open(other_server.url)
    browser.wait_for(lambda: browser.is_shown("#key-form"))
    assert browser.text("#status") == "API key needed"
    browser.fill("#key", "wrong")
    browser.press(ENTER)
    browser.wait_for(lambda: browser.is_shown("#key-form"))
    browser.fill("#key", KEY)
    browser.press(ENTER)
    browser.wait_for(lambda: browser.text("#status") == "live")
    assert not browser.is_shown("#key-form")

    assert browser.run("return document.querySelector('[name=mode]').value") == "text"
    browser.run("document.querySelector('[name=max_tokens]').value = 8000")
    browser.fill("#prompt", "Once upon")
    browser.press(ENTER)
    browser.wait_for(lambda: browser.text("#num-running") == "1")
    other_server.kill()
    browser.wait_for(lambda: browser.text("#status") == "no connection")
    browser.wait_for(lambda: browser.is_shown(".error"))
    assert browser.is_shown("#send"), "what was streaming has ended"
    other_server.start()
    browser.wait_for(lambda: browser.text("#status") == "live")
    assert browser.text("#num-running") == "0"
    browser.problems()


@pytest.mark.parametrize("view", ["chat", "engine"])
def test_a_phone_shows_one_view_without_scrolling_sideways(page: Browser, view: str) -> None:
    page.resize(360, 640)
    page.run("document.querySelector('[name=n]').value = 2; document.querySelector('[name=max_tokens]').value = 8000")
    page.fill("#prompt", "word" * 100)
    page.press(ENTER)
    page.wait_for(lambda: page.text("#num-running") == "2")
    page.click(f"[data-shows={view}]")
    assert page.is_shown("#chat") is (view == "chat")
    assert page.is_shown("#engine") is (view == "engine")
    wide = page.run(
        "return [...document.querySelectorAll('*')].filter((each) => each.checkVisibility()"
        " && each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).overflowX !== 'visible'"
        " && !each.matches('.visually-hidden, .model, textarea, input')).map((each) => each.outerHTML.slice(0, 80))"
    )
    assert wide == []
    assert page.run("return document.documentElement.scrollWidth") <= 360
    picture = page.screenshot()
    assert struct.unpack(">II", picture[16:24]) == (360, 640)
    page.click("[data-shows=chat]")
    page.click("#stop")
    page.wait_for(lambda: page.text("#num-running") == "0")


def test_who_does_not_look_is_not_served(page: Browser) -> None:
    """A hidden tab lets its stream go, and takes it up again when it is looked at."""
    streams = "return performance.getEntriesByType('resource').filter((each) => each.name.endsWith('/live')).length"
    hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
    hide += "document.dispatchEvent(new Event('visibilitychange'))"
    before = page.run(streams)
    page.run(hide, True)
    page.wait_for(lambda: page.run(streams) == before + 1)  # an entry is made when a stream ends
    page.run("document.querySelector('#num-running').textContent = 'old'")
    page.run(hide, False)
    page.wait_for(lambda: page.text("#num-running") == "0")


def test_themes_and_motion_follow_the_system(page: Browser) -> None:
    backgrounds = set()
    for scheme in ("light", "dark"):
        page.emulate("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        backgrounds.add(page.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    page.emulate("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    page.run("document.querySelector('[name=max_tokens]').value = 8000")
    page.fill("#prompt", "Hello")
    page.press(ENTER)
    page.wait_for(lambda: page.is_shown(".assistant"))
    style = "getComputedStyle(document.querySelector('.assistant .answer'), '::after')"
    assert page.run(f"return {style}.animationName") == "none"
    page.emulate("Emulation.setEmulatedMedia", features=[])
    page.click("#stop")
    page.wait_for(lambda: page.text("#num-running") == "0")
