// One step: queues, budget, block tables, physical blocks.

const CHIPS = 48; // requests of a queue that are named

const makeStepView = (p) => {
  const { W, trace, budget, mark, paint, swatch, item } = p;
  const pool = makePool(p);
  const isUpdate = () => p.moment === "update";

  const chip = (name, note) =>
    el("li", { class: "chip", "data-owner": name }, [
      swatch(name),
      el("span", { class: "id" }, name),
      note && el("small", {}, note),
    ]);

  const queue = (label, names, note) => {
    const rest = names.length - CHIPS;
    const chips = names.slice(0, CHIPS).map((name, i) => chip(name, note(name, i)));
    if (!names.length) chips.push(el("li", { class: "muted" }, W.none));
    if (rest > 0) chips.push(el("li", { class: "muted" }, `+ ${rest}`));
    return el(
      "div",
      { class: "queue" },
      el("div", { class: "title" }, label),
      el("ol", { "aria-label": label }, chips),
    );
  };

  const queues = (step) => {
    const running = step.running_queue.filter((name) => !isUpdate() || !step.finished.has(name));
    const note = (name) => ({ new: W.s.new, res: W.s.res, pre: W.s.pre })[stateOf(step, name)];
    const first = (name, i) => note(name) ?? (i === 0 ? W.head : undefined);
    return el("div", { class: "row" }, [
      queue(W.running(running.length), running, note),
      queue(W.waiting(step.waiting_queue.length), step.waiting_queue, first),
    ]);
  };

  const budgetBar = (step) => {
    const used = total(step);
    const words = trace.max_num_batched_tokens ? W.used(used, budget) : W.most(used, budget);
    const shares = [...step.scheduled].map(([name, n]) => ({ name, share: n / budget, tip: W.gets(name, n) }));
    const label = [words, ...[...step.scheduled].map(([name, n]) => `${name} ${n}`)].join(", ");
    return el(
      "div",
      { class: "budget" },
      el("div", { class: "title" }, W.budget, el("b", {}, words)),
      p.bar(label, shares),
    );
  };

  // ---- block tables

  const entry = (step, name, g, i, block, holders) => {
    const size = trace.block_size;
    const isHit = i < foundBlocks(step, name, size);
    const fresh = !isHit && step.before.get(name)?.groups[g]?.[i] !== block;
    const tip = sentence([
      W.maps(name, i, block),
      size && W.tokensOf(i * size, (i + 1) * size - 1),
      isHit && W.hit,
      fresh && W.added,
      holders.get(block)?.length > 1 && W.shared,
    ]);
    const look = `entry ${isHit ? "hit" : ""} ${fresh ? "fresh" : ""} ${mark(name)}`;
    const props = { role: "img", class: look, "data-block": block, style: paint(name) };
    return item("span", "tables", `${name} ${g} ${i}`, tip, props, String(block));
  };

  const entries = (step, name, held, holders) => {
    const lost = step.preempted.includes(name) && step.before.get(name);
    if (lost) {
      const blocks = lost.groups.flat().map((b) => el("del", { class: "lost" }, String(b)));
      const what = lost.counted === undefined ? blocks : W.counted(lost.counted);
      return el("span", { class: "entries" }, el("span", { class: "muted" }, W.lost), what);
    }
    if (!held) return el("span", { class: "muted" }, "–");
    if (held.counted !== undefined) return el("span", {}, W.counted(held.counted));
    const one = (group, g) => group.map((block, i) => entry(step, name, g, i, block, holders));
    return held.groups.map((group, g) => el("span", { class: "entries" }, one(group, g)));
  };

  const row = (step, name, held, holders) => {
    const state = stateOf(step, name, isUpdate());
    const tokens = step.scheduled.get(name) ?? 0;
    const hit = step.admitted_computed.get(name) ?? 0;
    const tip = sentence([
      W.gets(name, tokens),
      W.s[state],
      hit > 0 && W.found(hit),
      isUpdate() && step.sampled.has(name) && W.sampled([step.sampled.get(name)].flat().join(", ")),
      Object.hasOwn(trace.prompts, name) && W.prompt(trace.prompts[name]),
    ]);
    const label = [swatch(name), el("span", { class: "id" }, name)];
    const head = item("span", "tables", name, tip, { role: "img", class: "name", "data-owner": name }, label);
    const cell = (content, look) => el("td", { role: "gridcell", class: look }, content);
    return el("tr", { role: "row" }, [
      el("th", { role: "rowheader", scope: "row" }, head),
      cell(el("span", { class: `badge ${state}` }, W.s[state] || "–")),
      cell(String(tokens || ""), "num"),
      cell(entries(step, name, held, holders), "entries"),
    ]);
  };

  const blockTables = (step, tables, holders) => {
    const ended = isUpdate() ? step.finished.keys() : [];
    const names = new Set([...step.running_queue, ...tables.keys(), ...step.preempted, ...ended]);
    const heads = [W.request, W.state, W.tokens, W.table];
    const columns = heads.map((text) => el("th", { role: "columnheader", scope: "col" }, text));
    const rows = [...names].map((name) => row(step, name, tables.get(name), holders));
    const table = el("table", { role: "grid", "aria-label": W.tables }, [
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, columns)),
      el("tbody", { role: "rowgroup" }, rows),
    ]);
    return el("div", {}, el("div", { class: "title" }, W.tables), el("div", { class: "scroll" }, table));
  };

  return (step) => {
    const kept = [...step.tables].filter(([name]) => !isUpdate() || !step.finished.has(name));
    const tables = new Map(kept);
    const holders = new Map(); // block -> [request, entry] of every table that points to it
    for (const [name, { groups }] of tables) {
      for (const group of groups) {
        group.forEach((b, i) => (holders.has(b) ? holders.get(b).push([name, i]) : holders.set(b, [[name, i]])));
      }
    }
    const memory = el("div", { class: "row wide" }, blockTables(step, tables, holders), pool(step, tables, holders));
    return [queues(step), budgetBar(step), memory];
  };
};
