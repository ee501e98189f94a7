"use strict";
/* What all pages share: elements, tables, sizes, colours, the tooltip. Text of checkpoints becomes text nodes only. */
const views = {};
const page = {};

/* Text with what cannot be seen escaped: controls, marks of direction, tags, fillers, spaces other than " ". */
page.text = (value, limit = 240) => {
  let text = String(value).replace(/[\p{C}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u2800]|[^\S ]/gu, (c) => {
    const code = c.codePointAt(0).toString(16);
    return code.length > 4 ? "\\U" + code.padStart(8, "0") : "\\u" + code.padStart(4, "0");
  });
  if (limit && text.length > limit) text = text.slice(0, limit / 2 - 1) + " … " + text.slice(-(limit / 2 - 2));
  return text;
};
page.plural = (n, one, many = one + "s") => `${page.count(n)} ${n === 1 ? one : many}`;

page.el = (tag, attributes = {}, ...children) => {
  const svg =
    ["svg", "g", "rect", "text", "title", "path", "line", "clipPath", "pattern", "defs"].includes(tag) &&
    tag !== "title";
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity))
    if (child != null) node.append(child instanceof Node ? child : page.text(child));
  return node;
};

/* A number with a unit of thousands; with enough decimals to tell it from another that is ``step`` away. */
page.scaled = (n, units, step) => {
  let i = 0,
    unit = 1;
  while (Math.abs(n) / unit >= 999.5 && i < units.length - 1) {
    unit *= 1000;
    i++;
  }
  const decimals = step
    ? Math.min(9, Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9)))
    : i === 0 || Math.abs(n) / unit >= 99.95
      ? 0
      : 1;
  return (n / unit).toFixed(n === 0 ? 0 : decimals) + units[i];
};
page.size = (n, step = 0) => page.scaled(n, [" B", " kB", " MB", " GB", " TB", " PB", " EB"], step);
page.count = (n) => Math.round(n).toLocaleString("en-US");
page.short = (n, step = 0) => page.scaled(n, ["", "k", "M", "B", "T"], step);
page.number = (value, digits = 4) => {
  if (typeof value === "string") return value;
  if (value == null) return "";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return page.count(value);
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7))
    return value
      .toExponential(digits - 2)
      .replace("e+", "e")
      .replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(digits)));
};
page.dtype = (name) => ({ F32: "fp32", BF16: "bf16", F16: "fp16" })[name] || String(name).toLowerCase();
page.shape = (shape) => (shape.length ? shape.join(" × ") : "scalar");

/* The largest and the smallest of any number of numbers; Math.max takes some ten thousand arguments only. */
page.largest = (values, least = -Infinity) => values.reduce((most, v) => (v > most ? v : most), least);
page.smallest = (values, most = Infinity) => values.reduce((least, v) => (v < least ? v : least), most);

page.css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
page.dark = () =>
  matchMedia("(prefers-color-scheme: dark)").matches && !document.documentElement.classList.contains("print");

/* Okabe and Ito's palette, which people with any kind of colour vision tell apart. */
page.PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a400", "#7f7f7f"];
/* The stops of viridis: even steps of lightness, whatever the colour vision. */
page.STOPS = [
  [68, 1, 84],
  [71, 44, 122],
  [59, 81, 139],
  [44, 113, 142],
  [33, 144, 141],
  [39, 173, 129],
  [92, 200, 99],
  [170, 220, 50],
  [253, 231, 37],
];
page.ramp = (t, low = 0.06, high = 0.98) => {
  const at = (low + Math.min(1, Math.max(0, t)) * (high - low)) * (page.STOPS.length - 1);
  const i = Math.min(page.STOPS.length - 2, Math.floor(at));
  const mix = page.STOPS[i].map((v, k) => Math.round(v + (at - i) * (page.STOPS[i + 1][k] - v)));
  return "#" + mix.map((v) => v.toString(16).padStart(2, "0")).join("");
};
page.ink = (colour) => {
  const [r, g, b] = [1, 3, 5].map((i) => {
    const v = parseInt(colour.slice(i, i + 2), 16) / 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#111111" : "#ffffff";
};

page.glob = (text) => {
  const pattern = text.trim();
  if (!pattern) return null;
  const source = [...pattern]
    .map((c) => (c === "*" ? "[\\s\\S]*" : c === "?" ? "[\\s\\S]" : c.replace(/[.+^${}()|[\]\\\/]/g, "\\$&")))
    .join("");
  return new RegExp(/[*?]/.test(pattern) ? `^${source}$` : source, "iu");
};

page.tip = (() => {
  let box = null;
  return {
    show(x, y, title, facts) {
      if (!box) document.body.append((box = page.el("div", { id: "tip", role: "tooltip" })));
      box.replaceChildren(
        page.el("b", {}, title),
        page.el(
          "dl",
          {},
          facts
            .filter(([, v]) => v !== "" && v != null)
            .flatMap(([k, v]) => [page.el("dt", {}, k), page.el("dd", {}, v)]),
        ),
      );
      box.hidden = false;
      const { width, height } = box.getBoundingClientRect();
      box.style.left = Math.max(4, Math.min(x + 14, innerWidth - width - 6)) + "px";
      box.style.top = (y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18) + "px";
    },
    hide() {
      if (box) box.hidden = true;
    },
  };
})();

/* A table whose columns sort: columns are {title, right, value(row), cell(row)}. Of a long one the first rows are shown;
   the others are added some at a time, so that the page never stands still. */
page.CHUNK = 400;
page.table = (caption, columns, rows, { limit = 400, id = null, sort = null } = {}) => {
  const state = { rows, sort: sort ? sort[0] : -1, down: sort ? sort[1] : false, limit };
  const body = page.el("tbody");
  const heads = columns.map((c, i) =>
    !c.title
      ? page.el("td")
      : page.el(
          "th",
          { scope: "col", class: c.right ? "right" : null },
          page.el(
            "button",
            {
              type: "button",
              onclick: () => {
                state.down = state.sort === i ? !state.down : !!c.right;
                state.sort = i;
                draw();
              },
            },
            c.title,
          ),
        ),
  );
  const rowOf = (row) =>
    page.el(
      "tr",
      {},
      columns.map((c) =>
        page.el("td", { class: c.right ? "right" : c.name ? "name" : null }, c.cell ? c.cell(row) : c.value(row)),
      ),
    );
  const more = page.el("p", { class: "hint more", role: "status" });
  const all = page.el(
    "button",
    {
      type: "button",
      onclick: () => {
        state.limit = Infinity;
        draw();
      },
    },
    "Show all",
  );
  const draw = () => {
    let shown = state.rows;
    if (state.sort >= 0) {
      const value = columns[state.sort].value;
      shown = [...shown].sort((a, b) => {
        const p = value(a),
          q = value(b);
        return (p < q ? -1 : p > q ? 1 : 0) * (state.down ? -1 : 1);
      });
    }
    heads.forEach((h, i) =>
      i === state.sort
        ? h.setAttribute("aria-sort", state.down ? "descending" : "ascending")
        : h.removeAttribute("aria-sort"),
    );
    body.replaceChildren();
    clearTimeout(state.due);
    const add = () => {
      const first = body.rows.length,
        end = Math.min(state.limit, shown.length);
      body.append(...shown.slice(first, Math.min(end, first + (first ? page.CHUNK / 2 : page.CHUNK))).map(rowOf));
      const left = shown.length - body.rows.length;
      more.replaceChildren();
      if (body.rows.length < end) {
        more.append(`Adding ${page.plural(left, "more row")} …`);
        state.due = setTimeout(add);
      } else if (left > 0) more.append(`${page.plural(left, "more row")}. `, all);
    };
    add();
  };
  const table = page.el(
    "table",
    {},
    page.el("caption", {}, caption),
    page.el("thead", {}, page.el("tr", {}, heads)),
    body,
  );
  draw();
  const root = page.el(
    "div",
    { id },
    page.el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table),
    more,
  );
  root.update = (rows) => {
    state.rows = rows;
    draw();
  };
  return root;
};

page.facts = (pairs) =>
  page.el(
    "dl",
    { class: "facts" },
    pairs
      .filter(([, v]) => v !== "" && v != null)
      .map(([k, v, small]) =>
        page.el("div", {}, page.el("dt", {}, k), page.el("dd", {}, v, small ? page.el("small", {}, small) : null)),
      ),
  );
page.section = (title, ...children) => page.el("section", {}, page.el("h2", {}, title), children);
page.head = (title, lead, facts) =>
  document
    .querySelector("header")
    .replaceChildren(page.el("h1", {}, title), page.el("p", { class: "lead" }, lead), page.facts(facts));
page.say = (text) => {
  const live = document.getElementById("live");
  if (live.textContent !== text) live.textContent = text;
};

/* Redraw what is drawn by hand when its size, the colours or the medium change. */
page.onredraw = (draw, node) => {
  let due = 0;
  const later = () => {
    cancelAnimationFrame(due);
    due = requestAnimationFrame(draw);
  };
  new ResizeObserver(later).observe(node);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("print");
    draw();
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("print");
    later();
  });
  return later;
};

/* One tab stop for all boxes of a picture: arrow keys go from box to box, Home and End to the first and the last. */
page.oneStop = (svg) => {
  const boxes = [...svg.querySelectorAll(".leaf")];
  boxes.forEach((box, i) => {
    box.setAttribute("tabindex", i ? "-1" : "0");
    box.addEventListener("keydown", (e) => {
      const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: boxes.length - 1 }[
        e.key
      ];
      if (to === undefined || e.ctrlKey || e.metaKey || e.altKey) return;
      e.preventDefault();
      const next = boxes[Math.min(boxes.length - 1, Math.max(0, to))];
      boxes.forEach((each) => each.setAttribute("tabindex", each === next ? "0" : "-1"));
      next.focus();
    });
  });
};

page.canvas = (canvas, height) => {
  const width = canvas.clientWidth || canvas.parentNode.clientWidth || 600,
    ratio = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  return [g, width];
};

/* A function that shortens text to a width in pixels; "" if less than four letters fit. */
page.fitter = (font) => {
  const g = document.createElement("canvas").getContext("2d");
  g.font = font;
  const fit = (text, room) => {
    let shown = page.text(text, 160);
    if (g.measureText(shown).width <= room) return shown;
    while (shown && g.measureText(shown + "…").width > room) shown = shown.slice(0, -1);
    return shown.length < 4 ? "" : shown + "…";
  };
  fit.width = (text) => g.measureText(text).width;
  return fit;
};

page.hatch = (g, kind, colour) => {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const t = tile.getContext("2d");
  t.strokeStyle = t.fillStyle = colour;
  t.lineWidth = 1.2;
  t.beginPath();
  if (kind === "slash") {
    t.moveTo(-1, 7);
    t.lineTo(7, -1);
    t.moveTo(-1, 1);
    t.lineTo(1, -1);
    t.moveTo(5, 7);
    t.lineTo(7, 5);
  }
  if (kind === "back") {
    t.moveTo(-1, -1);
    t.lineTo(7, 7);
    t.moveTo(5, -1);
    t.lineTo(7, 1);
    t.moveTo(-1, 5);
    t.lineTo(1, 7);
  }
  if (kind === "bars") {
    t.moveTo(1, 0);
    t.lineTo(1, 6);
    t.moveTo(4, 0);
    t.lineTo(4, 6);
  }
  t.stroke();
  if (kind === "dots") {
    t.fillRect(1, 1, 1.8, 1.8);
    t.fillRect(4, 4, 1.8, 1.8);
  }
  return g.createPattern(tile, "repeat");
};

page.start = async () => {
  const node = document.getElementById("data");
  let text = node.textContent;
  if (node.dataset.encoding === "gzip") {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  const data = JSON.parse(text);
  await views[data.view](data, document.querySelector("main"));
  document.documentElement.dataset.ready = "1";
};
