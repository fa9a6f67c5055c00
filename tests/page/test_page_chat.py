"""The page in a browser: asking, streaming, stopping, repeating, with mouse and with keys alone."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from browser import ENTER, ESCAPE, SHIFT, TAB, Browser
from page_server import Server

LONG = {"max_tokens": "8000", "temperature": "0"}
SHORT = {"max_tokens": "12", "temperature": "0"}


def set_options(page: Browser, **values: str) -> None:
    """Fills in the settings as a user would, their panel being closed again afterwards."""
    page.run(
        "const form = document.querySelector('#settings');"
        "for (const [name, value] of Object.entries(arguments[0])) form.elements[name].value = value;"
        "form.dispatchEvent(new Event('input'))",
        values,
    )


def record_requests(page: Browser) -> None:
    """From now on the page keeps the body of its latest request in ``window.sent``."""
    page.run(
        "const real = window.fetch;"
        "window.fetch = (url, init) => { if (init?.body) window.sent = init.body; return real(url, init); }"
    )


def answers(page: Browser) -> list[str]:
    """The texts of all answers, samples one by one."""
    return page.run("return [...document.querySelectorAll('.assistant .answer')].map((each) => each.textContent)")


def ask(page: Browser, text: str) -> None:
    page.fill("#prompt", text)
    page.press(ENTER)


def wait_for_the_end(page: Browser) -> None:
    page.wait_for(lambda: page.is_shown("#send") and page.run("return !document.querySelector('[aria-busy=true]')"))


def test_send_and_stream(page: Browser, server: Server) -> None:
    set_options(page, **LONG | {"max_tokens": "1500"})
    page.fill("#prompt", "Hello")
    page.click("#send")
    lengths = set()
    page.wait_for(lambda: lengths.add(len("".join(answers(page)))) or page.is_shown("#send"))
    assert len(lengths) > 3, "the text grows while it is generated"
    assert page.text(".user .answer") == "Hello"
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1500, "temperature": 0}
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answers(page) == [whole["choices"][0]["message"]["content"]]
    tokens = whole["usage"]["completion_tokens"]
    assert page.text(".assistant .facts").startswith(f"{tokens} tokens · first after ")
    assert page.text("#announcer") == answers(page)[0], "a screen reader hears the answer once, when it is whole"


def test_stop_frees_the_blocks(page: Browser) -> None:
    set_options(page, **LONG)
    ask(page, "Hello")
    page.wait_for(lambda: page.text("#num-running") == "1" and len(answers(page)[0]) > 20)
    assert page.text("#requests .state") in ("prefill", "decode")
    in_use = page.wait_for(lambda: int(page.text("#count-used")))
    page.wait_for(lambda: int(page.text("#count-used")) > in_use)
    assert page.is_shown("#stop") and not page.is_shown("#send")
    page.click("#stop")
    wait_for_the_end(page)
    page.wait_for(lambda: (page.text("#num-running"), page.text("#count-used")) == ("0", "0"))
    assert page.text(".assistant .facts").endswith("stopped")
    assert int(page.text("#count-cached")) > 0, "what was computed can be used again"
    page.click("#reset")
    page.wait_for(lambda: page.text("#count-cached") == "0")


def test_long_answers_at_full_speed_leave_the_page_responsive(page: Browser) -> None:
    set_options(page, **LONG, n="4")
    ask(page, "Hello")
    page.wait_for(lambda: len("".join(answers(page))) > 10_000)
    started = time.monotonic()
    for _ in range(5):
        page.run("return 1")
    assert time.monotonic() - started < 5
    page.press(ESCAPE)
    wait_for_the_end(page)


def test_the_map_is_painted(page: Browser) -> None:
    colors = (
        "const {width, height} = document.querySelector('#map'); const seen = {};"
        "const copy = new OffscreenCanvas(width, height).getContext('2d', {willReadFrequently: true});"
        "copy.drawImage(document.querySelector('#map'), 0, 0);"
        "const {data} = copy.getImageData(0, 0, width, height);"
        "for (let at = 0; at < data.length; at += 4) {"
        "  const key = [...data.slice(at, at + 3)].join(); seen[key] = (seen[key] ?? 0) + 1; }"
        "return seen"
    )
    used, shared = "47,111,228", "238,138,23"
    page.emulate("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    assert not page.run(colors).keys() & {used, shared}
    set_options(page, **LONG, n="2")
    ask(page, "A prompt that is long enough to fill at least one block of sixteen tokens.")
    page.wait_for(lambda: {used, shared} <= page.run(colors).keys())
    page.press(ESCAPE)
    page.wait_for(lambda: not page.run(colors).keys() & {used, shared})


def test_keyboard_alone(page: Browser) -> None:
    set_options(page, **LONG)
    assert page.run("return document.activeElement.id") == "prompt"
    page.press("a")
    page.press(SHIFT, ENTER)
    page.press("b")
    assert page.run("return document.querySelector('#prompt').value") == "a\nb"
    page.press(ENTER)
    page.wait_for(lambda: len("".join(answers(page))) > 0)
    assert page.text(".user .answer") == "a\nb"
    assert page.run("return document.activeElement.id") == "prompt", "one can go on typing"
    page.press(ESCAPE)
    wait_for_the_end(page)
    assert page.text(".assistant .facts").endswith("stopped")
    stops = []
    for _ in range(30):
        page.press(TAB)
        stops.append(page.run("const e = document.activeElement; return e.id || e.dataset.action || e.textContent"))
        outline = page.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert (
            outline != "none" or stops[-1] in ("", None) or page.run("return document.activeElement === document.body")
        )
    for wanted in ("transcript", "regenerate", "prompt", "send", "clear", "reset"):
        assert wanted in stops, f"{wanted} cannot be reached: {stops}"


def test_regenerate_go_on_and_clear(page: Browser) -> None:
    set_options(page, **SHORT | {"temperature": "1"}, seed="1")
    ask(page, "Hello")
    wait_for_the_end(page)
    [first] = answers(page)
    set_options(page, seed="2")
    page.click(".assistant [data-action=regenerate]")
    wait_for_the_end(page)
    [second] = answers(page)
    assert second != first
    ask(page, "More")
    wait_for_the_end(page)
    assert answers(page)[0] == second and len(answers(page)) == 2
    assert "prompt tokens cached" in page.text(".message:last-child .facts")
    assert not page.text(".message:last-child .facts").count("· 0 of"), "the conversation so far is in the cache"
    page.click("#clear")
    assert answers(page) == []
    assert page.is_shown("#welcome")


def test_samples_side_by_side(page: Browser) -> None:
    set_options(page, **SHORT | {"temperature": "1"}, n="2", seed="5")
    ask(page, "Hello")
    wait_for_the_end(page)
    one, two = answers(page)
    assert one != two
    tops = page.run("return [...document.querySelectorAll('.sample[role=group]')].map((each) => each.offsetTop)")
    assert tops[0] == tops[1]
    page.click(".sample:nth-child(2) .choose input")
    record_requests(page)
    set_options(page, n="")
    ask(page, "More")
    wait_for_the_end(page)
    messages = json.loads(page.run("return window.sent"))["messages"]
    assert [message["content"] for message in messages] == ["Hello", two, "More"]


def test_system_prompt_and_sampling_are_sent(page: Browser) -> None:
    set_options(page, system="Be brief.", temperature="0.5", top_p="0.9", top_k="7", max_tokens="3", seed="-4")
    record_requests(page)
    ask(page, "Hello")
    wait_for_the_end(page)
    body = json.loads(page.run("return window.sent"))
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    chosen = {name: body[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")}
    assert chosen == {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 3, "seed": -4}
    assert "n" not in body, "what is left open is left to the server"


@pytest.mark.parametrize(("name", "value"), [("temperature", "3"), ("top_p", "0"), ("max_tokens", "9000"), ("n", "0")])
def test_bad_settings_are_shown_and_not_sent(page: Browser, name: str, value: str) -> None:
    set_options(page, **{name: value})
    ask(page, "Hello")
    assert page.run("return document.activeElement.name") == name
    assert page.run("return document.querySelector('#prompt').value") == "Hello"
    assert answers(page) == []


def test_a_refusal_is_told_and_the_question_comes_back(page: Browser) -> None:
    set_options(page, seed="99999999999999999999")
    ask(page, "Hello")
    page.wait_for(lambda: page.is_shown(".error"))
    assert "seed" in page.text(".error[role=alert]")
    assert page.run("return document.querySelector('#prompt').value") == "Hello"
    assert page.is_shown("#welcome")
    assert [entry for entry in page.problems() if "400" not in entry] == []  # Chromium notes every 400


def test_text_is_only_text(page: Browser) -> None:
    set_options(page, **SHORT)
    evil = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>"
    ask(page, evil)
    wait_for_the_end(page)
    assert page.text(".user .answer") == evil
    assert page.run("return document.querySelectorAll('#transcript img, #transcript b').length") == 0


def test_text_mode_continues_what_is_written(page: Browser, server: Server) -> None:
    set_options(page, **SHORT, mode="text")
    ask(page, "Once upon")
    wait_for_the_end(page)
    body = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answers(page) == [whole["choices"][0]["text"]]
