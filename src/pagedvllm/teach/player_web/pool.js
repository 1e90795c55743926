// The physical blocks: whose they are, how many tables point to them, which can be found by their prefix.

const makePool = (p) => {
  const { W, trace, color, mark, paint, item } = p;

  // Several owners share a block's colours.
  const fill = (names) => {
    if (!names.length) return undefined;
    if (names.length === 1) return paint(names[0]);
    const part = (name, i, all) => `${color(name)} ${(100 * i) / all.length}% ${(100 * (i + 1)) / all.length}%`;
    return `${paint(names[0])};background-image:linear-gradient(90deg,${names.slice(0, 4).map(part).join(",")})`;
  };

  const cell = (block, who, refs, isCached, how) => {
    const names = [...new Set(who.map(([name]) => name))];
    const owner = names.length && W.held(who.map(([name, i]) => W.entry(name, i)).join(", "));
    const nobody = refs > 0 ? W.inFlight : W.free;
    const parts = [W.block(block), owner || nobody, refs > 0 && W.refs(refs), isCached && W.cached];
    const kind = block === 0 ? "null" : names.length ? "held" : "free";
    const pattern = names.length === 1 ? mark(names[0]) : "";
    const look = `cell ${kind} ${pattern} ${isCached ? "cached" : ""} ${how}`;
    const props = { role: "option", "aria-selected": "false", class: look, style: fill(names) };
    const data = {
      "data-block": block,
      "data-owners": JSON.stringify(names),
      "data-refs": refs > 1 ? refs : undefined,
    };
    const tip = block === 0 ? W.nullBlock : sentence(parts);
    return item("span", "pool", String(block), tip, { ...props, ...data }, String(block));
  };

  // After schedule() the counts are those of the tables; after update() they were recorded themselves.
  const references = (step, holders) => {
    if (p.moment === "schedule") return new Map([...holders].map(([block, who]) => [block, who.length]));
    const counts = Object.entries(step.refs ?? {});
    return new Map(counts.flatMap(([count, blocks]) => ids(blocks).map((block) => [block, Number(count)])));
  };

  const cells = (step, holders) => {
    const cached = new Set(ids(step.cached ?? ""));
    const refs = references(step, holders);
    const before = new Map([...step.before].map(([name, { groups }]) => [name, new Set(groups.flat())]));
    const all = Array.from({ length: p.top + 1 }, (_, block) => {
      const who = block > 0 ? (holders.get(block) ?? []) : [];
      const isHit = who.some(([name, i]) => i < foundBlocks(step, name, trace.block_size));
      const isNew = who.length > 0 && who.every(([name]) => !before.get(name)?.has(block));
      const how = isHit ? "hit" : isNew ? "fresh" : "";
      return cell(block, who, refs.get(block) ?? 0, cached.has(block), how);
    });
    const width = `--cell:${28 + 7 * String(p.top).length}px`;
    return el("div", { class: "cells", role: "listbox", "aria-label": W.blocks, style: width }, all);
  };

  const counted = (tables, free) => {
    const shares = [...tables].map(([name, table]) => {
      return { name, share: table.counted / trace.blocks, tip: `${name}: ${W.counted(table.counted)}` };
    });
    const label = [W.freeOf(free, trace.blocks), ...[...tables].map(([name, t]) => `${name} ${t.counted}`)].join(", ");
    return [p.bar(label, shares), el("p", { class: "muted" }, W.countedAll)];
  };

  return (step, tables, holders) => {
    const free = p.moment === "schedule" ? step.free_after_schedule : step.free_after_update;
    const title = el(
      "div",
      { class: "title" },
      W.blocks,
      free !== undefined && el("b", {}, W.freeOf(free, trace.blocks)),
    );
    if (p.counting) return el("div", {}, title, counted(tables, free));
    const queue = p.moment === "update" ? step.free_queue : undefined;
    const order = queue?.replaceAll("-", "–").replaceAll(" ", ", ") || W.none;
    return el("div", {}, [
      title,
      cells(step, holders),
      trace.blocks > p.top && el("p", { class: "muted" }, W.never(trace.blocks - p.top)),
      queue !== undefined && el("p", { class: "freequeue" }, el("b", {}, W.queue), ` ${order}`),
      p.legend(["free", "cached", "shared", "fresh", "hit"]),
    ]);
  };
};
