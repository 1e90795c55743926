// Small parts that the views are made of.

// Colours that colour-blind readers tell apart, times four patterns; then they come again.
const COLORS = ["#56b4e9", "#e69f00", "#2fb58c", "#f0e442", "#dc94b8", "#f08a55", "#9fb4f0", "#bdbdb2"];

// Attributes and text nodes only: whatever a request is called, it is never read as HTML.
const el = (tag, props, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(2).filter((child) => child !== undefined && child !== false));
  return node;
};

const makeParts = (p) => {
  const color = (name) => COLORS[p.order.get(name) % COLORS.length];
  const mark = (name) => `mark${Math.floor(p.order.get(name) / COLORS.length) % 4}`;
  const paint = (name) => `background-color:${color(name)}`;
  const swatch = (name) => el("i", { class: `swatch ${mark(name)}`, style: paint(name), "aria-hidden": "true" });

  // What can be pointed at, by pointer or keyboard, and then says `tip`.
  const item = (tag, group, key, tip, props, ...children) => {
    const data = { "data-group": group, "data-key": key, "data-tip": tip };
    return el(tag, { ...data, "aria-label": tip, tabindex: -1, ...props }, children);
  };

  const bar = (label, shares) => {
    const parts = shares.map(({ name, share, tip }) => {
      const style = `width:${100 * share}%;${paint(name)}`;
      return el("span", { class: `part ${mark(name)}`, "data-owner": name, "data-tip": tip, style });
    });
    return el("div", { class: "bar", role: "img", "aria-label": label }, parts);
  };

  const legend = (keys) => {
    const texts = { shared: "×2", pre: "×", wait: "·", abort: "a" };
    const sample = (key) => el("i", { class: `sample ${key}`, "aria-hidden": "true" }, texts[key] ?? "");
    return el(
      "ul",
      { class: "legend" },
      keys.map((key) => el("li", {}, sample(key), p.W.key[key])),
    );
  };

  return { color, mark, paint, swatch, item, bar, legend };
};
