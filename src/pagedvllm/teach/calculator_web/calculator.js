// One element: controls, bar, results; light and dark.

const PARTS = ["weights", "activations", "non_torch", "cuda_graphs", "kv_cache", "used_before", "unused"];
const COUNTS = { block_size: 4096, max_model_len: 2 ** 24, max_num_seqs: 2 ** 16, max_num_batched_tokens: 2 ** 20 };
const AMOUNTS = ["non_torch", "cuda_graphs", "used_before"];

// Attributes and text nodes only: whatever a model is called, it is never read as HTML.
const el = (tag, props, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(2).filter((child) => child !== undefined && child !== false));
  return node;
};

const start = (host) => {
  host.dataset.ready = "";
  const data = JSON.parse(host.querySelector("script[type='application/json']").textContent);
  const W = WORDS[document.documentElement.lang.startsWith("zh") ? "zh" : "en"];
  const s = { ...data.settings }; // what the controls say; amounts in bytes
  const controls = {};

  // ---- controls

  const field = (name, label, control, about) => {
    controls[name] = control;
    control.id = name;
    if (about) control.setAttribute("aria-describedby", `about-${name}`);
    control.addEventListener("input", () => changed(name));
    const note = about && el("small", { id: `about-${name}` }, about);
    return el("div", { class: "field", "data-field": name }, el("label", { for: name }, label), control, note);
  };
  const choice = (name, label, options, about) => {
    const items = Object.keys(options).map((key) => el("option", { value: key }, key));
    return field(name, label, el("select", {}, items), about);
  };
  const count = (name) =>
    field(name, el("code", {}, name), el("input", { type: "number", min: 1, max: COUNTS[name], step: 1 }));
  const amount = (name) =>
    field(name, W[name], el("input", { type: "number", min: 0, max: 1000, step: 0.05 }), W.about[name]);
  const slider = el("input", { type: "range", min: 0, max: 1, step: 0.01 });
  const shown = el("span", { class: "value" });
  const share = field("gpu_memory_utilization", [el("code", {}, "gpu_memory_utilization"), " ", shown], slider);
  const settings = el(
    "div",
    { class: "settings", role: "group", "aria-label": W.settings },
    choice("model", W.model, data.models),
    choice("gpu", W.gpu, data.gpus, W.about.gpu),
    choice("dtype", el("code", {}, "dtype"), data.dtypes),
    share,
    Object.keys(COUNTS).map(count),
    AMOUNTS.map(amount),
  );

  const fill = () => {
    for (const [name, control] of Object.entries(controls))
      control.value = AMOUNTS.includes(name) ? Number((s[name] / GIB).toFixed(3)) : s[name];
  };

  // A new model keeps max_model_len within its positions; a new GPU has other defaults, as in the engine.
  const adapt = (name, before) => {
    if (name === "model") s.max_model_len = Math.min(s.max_model_len, data.models[s.model].positions);
    if (name !== "gpu") return;
    for (const [limit, value] of Object.entries(data.gpus[s.gpu].defaults))
      if (s[limit] === data.gpus[before].defaults[limit]) s[limit] = value;
  };

  // The message about a value that cannot be, or "".
  const wrong = (name, control) => {
    const value = Number(control.value);
    const filled = control.value.trim() !== "" && Number.isFinite(value);
    if (name in COUNTS && !(filled && Number.isInteger(value) && value >= 1 && value <= COUNTS[name]))
      return W.whole(name, 1, COUNTS[name]);
    if (AMOUNTS.includes(name) && !(filled && value >= 0 && value <= 1000)) return W.amount(W[name].split(/,|，/)[0]);
    return "";
  };

  function changed(name) {
    const control = controls[name];
    const before = s[name];
    if (!wrong(name, control)) {
      if (control.localName === "select") s[name] = control.value;
      else s[name] = AMOUNTS.includes(name) ? Math.round(Number(control.value) * GIB) : Number(control.value);
      if (s[name] !== before) adapt(name, before);
      if (control.localName === "select") fill();
    }
    draw();
  }

  // ---- results

  const status = el("p", { class: "status", role: "status", "aria-live": "polite" });
  const bar = el("div", { class: "bar", role: "img" });
  const marks = el("div", { class: "marks", "aria-hidden": "true" });
  const body = el("tbody", {});
  const head = [W.part, W.size, W.share].map((text) => el("th", { scope: "col" }, text));
  const table = el("table", { "aria-label": W.memory }, el("thead", {}, el("tr", {}, head)), body);
  const numbers = el("dl", { "aria-label": W.results });
  const steps = el("ol", {});
  const swatch = (name) => el("i", { class: `swatch ${name}`, "aria-hidden": "true" });

  const drawBar = (p, parts) => {
    const shown = parts.filter(([, bytes]) => bytes > 0);
    const all = Math.max(
      p.total,
      shown.reduce((sum, [, bytes]) => sum + bytes, 0),
    );
    const width = (bytes) => `${(100 * bytes) / all}%`;
    bar.setAttribute("aria-label", W.bar(shown.map(([key, b]) => `${W.parts[key]} ${gib(b)}`).join(", "), gib(p.total)));
    bar.replaceChildren(
      ...shown.map(([key, bytes]) => {
        const tip = `${W.parts[key]}: ${gib(bytes)}`;
        return el("span", { class: `part ${key}`, "data-part": key, title: tip, style: `width:${width(bytes)}` });
      }),
    );
    const mark = (kind, at, text) => el("span", { class: `mark ${kind}`, style: `left:${width(at)}`, title: text });
    marks.replaceChildren(
      mark("limit", p.requested, W.limit(s.gpu_memory_utilization)),
      all > p.total ? mark("end", p.total, W.end) : "",
    );
  };

  const drawTable = (p, parts) =>
    body.replaceChildren(
      ...parts.map(([key, bytes]) => {
        const name = el("th", { scope: "row" }, swatch(key), bytes < 0 ? W.missing : W.parts[key]);
        const percent = `${((100 * Math.abs(bytes)) / p.total).toFixed(1)}%`;
        const size = el("td", { "data-part": key, "data-value": bytes, title: W.bytes(bytes) }, gib(Math.abs(bytes)));
        return el("tr", {}, name, size, el("td", {}, percent));
      }),
    );

  const drawNumbers = (p) => {
    const text = {
      concurrency: W.times(p.concurrency, p.whole_requests),
      token_bytes: W.bytes(p.token_bytes),
      page_bytes: W.bytes(p.page_bytes),
    };
    const pair = (key) => [
      el("dt", {}, W.out[key]),
      el("dd", { "data-out": key, "data-value": p[key] }, text[key] ?? n(p[key])),
    ];
    numbers.replaceChildren(...Object.keys(W.out).map((key) => el("div", {}, pair(key))));
  };

  function draw() {
    const p = plan(data, s);
    p.highest = Math.max(0, Math.floor((100 * p.free) / p.total) / 100);
    const messages = Object.entries(controls).map(([name, control]) => {
      const message = wrong(name, control);
      control.setAttribute("aria-invalid", Boolean(message));
      return message;
    });
    const bad = messages.filter(Boolean).join(" ");
    const parts = PARTS.map((key) => [key, p[key]]);
    drawBar(p, parts);
    drawTable(p, parts);
    drawNumbers(p);
    shown.textContent = s.gpu_memory_utilization.toFixed(2);
    slider.setAttribute("aria-valuetext", `${s.gpu_memory_utilization.toFixed(2)}: ${gib(p.requested)}`);
    const text = bad || (p.problem ? W.no[p.problem](p, s, data.models[s.model]) : W.fits(p, s));
    if (status.textContent !== text) status.textContent = text;
    host.dataset.problem = bad ? "input" : p.problem;
    steps.replaceChildren(
      ...[
        W.requested(p, s.gpu_memory_utilization),
        W.available(p),
        W.blocks(p, s),
        W.longest(p, s),
      ].map((line) => el("li", {}, line)),
    );
  }

  // ---- the frame

  const frame = el(
    "section",
    { class: "frame", role: "group", "aria-label": W.name, onkeydown: (event) => event.stopPropagation() },
    el("p", { class: "name" }, W.name),
    settings,
    status,
    el("div", { class: "scale" }, bar, marks),
    el("p", { class: "hint" }, W.hint.marks),
    el("div", { class: "row" }, table, numbers),
    el("details", {}, el("summary", {}, W.how), steps, el("p", { class: "hint" }, W.hint.assumes)),
  );
  host.attachShadow({ mode: "open" }).append(el("style", {}, data.css), frame);

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
  fill();
  draw();
};

for (const host of document.querySelectorAll(".pagedvllm-calculator:not([data-ready])")) start(host);
