// One element: controls, keyboard, pointer, light and dark.

const start = (host) => {
  host.dataset.ready = "";
  const trace = JSON.parse(host.querySelector("script[type='application/json']").textContent);
  const steps = unfold(trace);
  const last = steps.length - 1;
  const W = WORDS[document.documentElement.lang.startsWith("zh") ? "zh" : "en"];
  const tables = steps.flatMap((step) => [...step.tables.values()]);
  const p = {
    trace,
    steps,
    W,
    order: new Map(trace.requests.map((name, i) => [name, i])),
    budget: trace.max_num_batched_tokens ?? Math.max(1, largest(steps.map(total))),
    counting: tables.length > 0 && tables.every((table) => table.counted !== undefined),
    top: largest([...tables.flatMap((table) => table.groups.flat()), ...steps.flatMap((s) => ids(s.cached ?? ""))]),
    at: 0,
    view: "step",
    moment: "schedule",
  };
  Object.assign(p, makeParts(p));
  const views = { step: makeStepView(p), timeline: makeTimeline(p) };
  const remembered = {}; // group -> key of the item that Tab comes to; of the timeline, the request
  let timer = 0;

  // ---- the frame

  const button = (label, text, act) =>
    el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
  const slider = el("input", { type: "range", min: 0, max: last, value: 0, "aria-label": W.slider });
  slider.addEventListener("input", () => go(Number(slider.value)));
  const where = el("span", { class: "where" });
  const status = el("p", { class: "events", role: "status", "aria-live": "polite" });
  const play = button(W.play, "", () => (timer ? stop() : run()));
  play.className = "play";
  const tabs = Object.keys(views).map((name) => {
    const props = { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel" };
    return el("button", { ...props, onclick: () => look(name) }, W[name]);
  });
  const moments = ["schedule", "update"].map((name) =>
    el("button", { type: "button", "data-moment": name, onclick: () => turn(name) }, W[name]),
  );
  const momentBar = el("div", { class: "moments", role: "group", "aria-label": W.moment }, moments);
  const panel = el("div", { id: "panel", role: "tabpanel" });
  const detail = el("p", { class: "detail" });
  const controls = [
    button(W.first, "|◀", () => go(0)),
    button(W.back, "◀", () => go(p.at - 1)),
    play,
    button(W.next, "▶", () => go(p.at + 1)),
    button(W.last, "▶|", () => go(last)),
  ];
  const tabList = el("div", { role: "tablist", "aria-label": W.views, class: "tabs", onkeydown: tabKeys }, tabs);
  const frame = el(
    "section",
    { class: "frame", role: "group", "aria-label": trace.title, onkeydown: keys },
    el("header", {}, el("strong", {}, trace.title), tabList),
    el("div", { class: "controls" }, controls, slider, where, momentBar),
    status,
    panel,
    detail,
    el("p", { class: "hint" }, W.hint),
  );
  const root = host.attachShadow({ mode: "open" });
  root.append(el("style", {}, trace.css), frame);

  // ---- drawing

  // What happened in a step, in words.
  const events = (step) => {
    const hit = (name) => (step.admitted_computed.get(name) ? W.e.hit(step.admitted_computed.get(name)) : "");
    const some = ["arrived", "aborted", "preempted"].filter((kind) => step[kind].length);
    const started = ["resumed", "new"].flatMap((kind) => step[kind].map((name) => W.e[kind](name) + hit(name)));
    const work = step.scheduled.size ? W.e.work(step.scheduled.size, total(step)) : W.e.nothing;
    const ended = [...step.finished].map(([name, end]) => W.e.finished(name, end));
    return sentence([
      ...some.map((kind) => W.e[kind](step[kind].join(", "))),
      ...started,
      step.idle ? W.e.idle : work,
      ...ended,
    ]);
  };

  function draw() {
    const step = steps[p.at];
    const { group, key } = root.activeElement?.dataset ?? {};
    const across = panel.querySelector(".scroll")?.scrollLeft ?? 0;
    panel.replaceChildren(...views[p.view](step).filter(Boolean));
    drawFrame(step);
    for (const cell of panel.querySelectorAll(`[data-at="${p.at}"]`)) cell.classList.add("now");
    const wanted = { ...remembered, timeline: `${remembered.timeline} ${p.at}` };
    for (const name of ["tables", "pool", "timeline"]) tabStop(name, wanted[name]);
    const box = panel.querySelector(".scroll");
    box.scrollLeft = across;
    if (p.view === "timeline") follow(box);
    detail.textContent = W.rest; // unless focus says better
    if (!group) return;
    const same = find(group, group === "timeline" ? wanted.timeline : key) ?? items(group)[0];
    (same ?? slider).focus({ preventScroll: true });
  }

  function drawFrame(step) {
    const place = W.where(step.step, `${p.at + 1}/${steps.length}`);
    slider.value = p.at;
    slider.setAttribute("aria-valuetext", place);
    where.textContent = place;
    status.setAttribute("aria-live", timer ? "off" : "polite"); // while it plays, nobody can listen that fast
    status.textContent = events(step);
    for (const tab of tabs) {
      const on = tab.id === `tab-${p.view}`;
      tab.setAttribute("aria-selected", on);
      tab.tabIndex = on ? 0 : -1;
    }
    panel.setAttribute("aria-labelledby", `tab-${p.view}`);
    momentBar.hidden = p.view !== "step";
    for (const choice of moments) choice.setAttribute("aria-pressed", choice.dataset.moment === p.moment);
    const label = timer ? W.pause : W.play;
    play.textContent = `${timer ? "❚❚" : "▶"} ${label}`;
    play.title = label;
    play.setAttribute("aria-label", label);
  }

  // Keep the current column in sight without moving the page.
  function follow(box) {
    const head = panel.querySelector("thead .now");
    const left = head.offsetLeft - panel.querySelector("thead th").offsetWidth;
    const right = head.offsetLeft + head.offsetWidth;
    if (left < box.scrollLeft) box.scrollLeft = left;
    else if (right > box.scrollLeft + box.clientWidth) box.scrollLeft = right - box.clientWidth;
  }

  const items = (group) => [...panel.querySelectorAll(`[data-group="${group}"]`)];
  const find = (group, key) => items(group).find((node) => node.dataset.key === key);

  // Of each group of items one can be reached with Tab, the others from it with the arrows.
  function tabStop(group, key) {
    const all = items(group);
    const now = all.find((node) => node.classList.contains("now"));
    const chosen = all.find((node) => node.dataset.key === key) ?? now ?? all[0];
    for (const node of all) node.tabIndex = node === chosen ? 0 : -1;
  }

  // ---- moving

  function go(to) {
    p.at = Math.max(0, Math.min(last, to));
    if (timer && p.at === last) stop();
    else draw();
  }
  function look(name) {
    p.view = name;
    draw();
  }
  function turn(name) {
    p.moment = name;
    draw();
  }
  function run() {
    if (p.at === last) p.at = 0;
    timer = setInterval(() => (host.isConnected ? go(p.at + 1) : stop()), 900);
    draw();
  }
  function stop() {
    clearInterval(timer);
    timer = 0;
    draw();
  }

  const other = { step: "timeline", timeline: "step", schedule: "update", update: "schedule" };
  const moves = {
    n: () => go(p.at + 1),
    p: () => go(p.at - 1),
    t: () => look(other[p.view]),
    u: () => turn(other[p.moment]),
    Home: () => go(0),
    End: () => go(last),
    PageDown: () => go(p.at + 10),
    PageUp: () => go(p.at - 10),
  };

  function keys(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { group, at } = event.target.dataset;
    const move = moves[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (move) move();
    else if (group && event.key.startsWith("Arrow")) walk(event.target, group, event.key.slice(5));
    else if (group === "timeline" && event.key === "Enter") {
      p.at = Number(at);
      look("step");
      tabs[0].focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  function tabKeys(event) {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    look(other[p.view]);
    root.getElementById(`tab-${p.view}`).focus();
    event.preventDefault();
  }

  // To the nearest item on that side; in the timeline the step goes along.
  function walk(from, group, side) {
    const all = items(group);
    let to = all[all.indexOf(from) + { Left: -1, Right: 1 }[side]];
    if (side === "Up" || side === "Down") to = nearest(all, from.getBoundingClientRect(), side === "Down" ? 1 : -1);
    if (!to || (group === "timeline" && !["Up", "Down"].includes(side) && to.dataset.owner !== from.dataset.owner))
      return;
    to.focus({ preventScroll: group === "timeline" });
    if (group === "timeline") go(Number(to.dataset.at));
  }

  function nearest(all, box, sign) {
    const boxes = all.map((node) => [node, node.getBoundingClientRect()]);
    const beyond = boxes.filter(([, r]) => sign * (r.top - box.top) > box.height / 2);
    const distance = ([, r]) => Math.abs(r.left - box.left) + 4 * Math.abs(r.top - box.top);
    return beyond.sort((a, b) => distance(a) - distance(b))[0]?.[0];
  }

  // ---- pointing: by pointer or focus

  // An entry of a table and its block light up together; so do a request and all that it holds.
  const light = (node) => {
    for (const old of panel.querySelectorAll(".hot")) {
      old.classList.remove("hot");
      if (old.role === "option") old.setAttribute("aria-selected", "false");
    }
    const { block, owner } = node?.dataset ?? {};
    const holds = ({ dataset }) => dataset.owners !== undefined && JSON.parse(dataset.owners).includes(owner);
    const near = (one) =>
      block !== undefined ? one.dataset.block === block : one.dataset.owner === owner || holds(one);
    const all = [...panel.querySelectorAll("[data-block], .name, .chip, .part")];
    for (const one of node && p.view === "step" ? all.filter(near) : []) {
      one.classList.add("hot");
      if (one.role === "option") one.setAttribute("aria-selected", "true");
    }
  };
  const point = (event) => {
    const node = event.target.closest("[data-tip], .chip");
    if (!node) return;
    const { tip, owner } = node.dataset;
    detail.textContent = tip ?? W.gets(owner, steps[p.at].scheduled.get(owner) ?? 0);
    light(node);
  };
  panel.addEventListener("pointerover", point);
  panel.addEventListener("pointerleave", () => {
    light();
    detail.textContent = W.rest;
  });
  panel.addEventListener("focusin", (event) => {
    const { group, key, owner } = event.target.dataset;
    if (!group) return;
    remembered[group] = group === "timeline" ? owner : key;
    tabStop(group, key);
    point(event);
  });
  panel.addEventListener("click", (event) => {
    const cell = event.target.closest("[data-at]");
    if (cell) go(Number(cell.dataset.at));
  });

  // ---- light or dark: what the page says, else what the system prefers

  const prefers = matchMedia("(prefers-color-scheme: dark)");
  const dress = () => {
    const page = document.documentElement;
    const { jpThemeLight, vscodeThemeKind, theme } = document.body.dataset;
    const jupyter = jpThemeLight && (jpThemeLight === "true" ? "light" : "dark");
    const said = page.dataset.theme ?? page.getAttribute("theme") ?? theme ?? jupyter ?? vscodeThemeKind ?? "";
    const dark = said.includes("dark") || (!said.includes("light") && prefers.matches);
    host.dataset.look = dark ? "dark" : "light";
  };
  prefers.addEventListener("change", dress);
  const watcher = new MutationObserver(dress);
  for (const node of [document.documentElement, document.body]) watcher.observe(node, { attributes: true });
  dress();
  draw();
};

for (const host of document.querySelectorAll(".pagedvllm-player:not([data-ready])")) start(host);
