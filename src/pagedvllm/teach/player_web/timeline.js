// Requests by steps, with what each got in each step.

const WINDOW = 60; // steps at once

const makeTimeline = (p) => {
  const { W, trace, steps, swatch, item, legend } = p;
  const row = (head, cells, props) =>
    el("tr", { role: "row" }, el("th", { role: "rowheader", scope: "row", ...props }, head), cells);

  // A darker cell has more tokens: from one shade to the next they double.
  const cell = (step, name, index) => {
    const state = stateOf(step, name);
    if (state === "gone") return el("td", { role: "gridcell", "data-at": index });
    const tokens = step.scheduled.get(name) ?? 0;
    const hit = step.admitted_computed.get(name) ?? 0;
    const place = W.where(step.step, `${index + 1}/${steps.length}`);
    const tip = [place, W.gets(name, tokens), W.s[state], hit && W.found(hit), step.finished.get(name)];
    const shade = tokens ? `n${Math.min(5, Math.floor(Math.log2(tokens)))}` : "";
    const text = tokens ? String(tokens) : ({ pre: "×", wait: "·", abort: "a" }[state] ?? "–");
    const look = `t ${state} ${shade} ${hit ? "hit" : ""}`;
    const props = { role: "gridcell", "data-at": index, "data-owner": name, class: look };
    return item("td", "timeline", `${name} ${index}`, sentence(tip), props, text);
  };

  const heads = (part, from) =>
    part.map((step, i) => {
      const number = String(step.step);
      const shown = (from + i) % 5 === 0 ? number : el("span", { class: "hidden" }, number);
      return el("th", { role: "columnheader", scope: "col", "data-at": from + i }, shown);
    });

  const sums = (label, part, from, value) =>
    row(
      label,
      part.map((step, i) => el("td", { role: "gridcell", class: "num", "data-at": from + i }, String(value(step)))),
    );

  return () => {
    const from = Math.floor(p.at / WINDOW) * WINDOW;
    const part = steps.slice(from, from + WINDOW);
    const names = trace.requests.filter((name) => part.some((step) => stateOf(step, name) !== "gone"));
    const range = W.part(part[0].step, part[part.length - 1].step);
    const rows = names.map((name) =>
      row(
        [swatch(name), name],
        part.map((step, i) => cell(step, name, from + i)),
        { class: "id" },
      ),
    );
    const corner = el("th", { role: "columnheader", scope: "col" }, W.request);
    const free = (step) => step.free_after_update ?? step.free_after_schedule ?? "";
    const table = el(
      "table",
      { role: "grid", class: "timeline", "aria-label": `${W.timeline}, ${range}` },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, corner, heads(part, from))),
      el("tbody", { role: "rowgroup" }, rows),
      el("tfoot", { role: "rowgroup" }, sums(W.total, part, from, total), sums(W.freeRow, part, from, free)),
    );
    return [
      steps.length > WINDOW && el("p", { class: "muted" }, W.partOf(range, steps[steps.length - 1].step)),
      el("div", { class: "scroll" }, table),
      legend(["token", "many", "hit", "wait", "pre", "fin", "abort"]),
    ];
  };
};
