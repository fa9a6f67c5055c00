// Puts the page together.

import { useKey } from "./api.js";
import { Chat } from "./chat.js";
import { LiveView } from "./live.js";
import { Settings } from "./settings.js";

const element = (id) => document.getElementById(id);

const settings = new Settings();
new Chat(settings, askForKey);
const live = new LiveView({ onModel, onKeyNeeded: askForKey });

function onModel(model) {
  settings.useModel(model);
  document.title = `${model.name} · jaxpage`;
}

function askForKey() {
  element("key-form").hidden = false;
  element("key").focus();
}

element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(element("key").value);
  element("key-form").hidden = true;
  element("prompt").focus();
  live.retry();
});

for (const button of document.querySelectorAll("[data-shows]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.shows;
    for (const each of document.querySelectorAll("[data-shows]")) each.setAttribute("aria-pressed", each === button);
  });
}

// Where a finger types, the focus would bring up the keyboard before anybody asked for it.
if (!matchMedia("(pointer: coarse)").matches) element("prompt").focus();
