/* Charts over steps or layers, by uPlot, in the colours of the page. */
page.charts = [];

/* The norm of a tensor all of whose values are NaN or infinite. */
page.UNDEFINED = "undefined";

/* Why a chart does not draw a value; "" if it does. */
page.whyLeftOut = (v, log) => {
  if (v == null) return "no value";
  if (v === page.UNDEFINED) return "undefined (all values are NaN or infinite)";
  const number = typeof v === "string" ? Number(v.replace(/inf(inity)?$/i, "Infinity")) : v;
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return "infinite";
  if (log && number <= 0) return `${number ? "less than 0" : "0"} (no place on a logarithmic axis)`;
  return "";
};

/* The values that a chart does not draw and where they are, as a sentence; "" if it draws all. sparse: not every series
   has a value everywhere. */
page.leftOut = (series, log, places, noun, sparse) => {
  const found = new Map();
  for (const s of series)
    s.values.forEach((v, i) => {
      const why = v == null && sparse ? "" : page.whyLeftOut(v, log);
      if (!why) return;
      const place = series.length > 1 ? `${places(i)} (${s.title})` : places(i);
      found.set(why, [...(found.get(why) ?? []), place]);
    });
  const parts = [...found].map(([why, at]) => {
    const shown = at.slice(0, 5).map((place) => page.text(place, 80));
    return at.length > 5
      ? `${why} at ${page.count(at.length)} ${noun}s: ${shown.join(", ")}, ...`
      : `${why} at ${noun}${at.length > 1 ? "s" : ""} ${shown.join(", ")}`;
  });
  return parts.length ? `Not in this chart: ${parts.join("; ")}.` : "";
};

/* Whether a logarithmic axis shows more of positive numbers than a linear one. */
page.wantsLog = (series) => {
  const values = series.flatMap((s) => s.values).filter((v) => typeof v === "number" && Number.isFinite(v) && v > 0);
  return values.length > 0 && page.largest(values) / 20 > page.smallest(values);
};

/* A logarithmic axis is a linear one of exponents: uPlot's own has no ticks if the range is above 1e17. */
page.decades = (low, high) => {
  if (low == null) return [-1, 1];
  const from = Math.floor(low + 1e-9),
    to = Math.ceil(high - 1e-9);
  return [from, Math.max(to, from + 1)];
};
page.logTicks = (from, to) => {
  const step = Math.max(1, Math.ceil((to - from) / 7)),
    ticks = [];
  for (let k = Math.ceil(from / step) * step; k <= to; k += step) {
    ticks.push(k);
    if (to - from <= 2 && k < to) ticks.push(k + Math.log10(2), k + Math.log10(5));
  }
  return ticks;
};

/* The number that a place on an axis of exponents stands for. */
page.power = (k) => (Number.isInteger(k) && Math.abs(k) > 5 ? `1e${k}` : page.number(10 ** k, 4));

/* A number with enough digits to tell it from another that is ``step`` away. */
page.tick = (v, step = 0) => {
  const digits = step && v ? Math.ceil(Math.log10(Math.abs(v) / step) - 1e-9) + 1 : 6;
  return page.number(v, Math.min(15, Math.max(4, digits)));
};

/* Times in UTC, as precise as a step in seconds asks for; the date where it changes. */
page.times = (at, step) => {
  const day = (v) => new Date(v * 1000).toISOString().slice(0, 10),
    clock = (v) => new Date(v * 1000).toISOString().slice(11, step < 1 ? 23 : step < 60 ? 19 : 16);
  if (step >= 86400) return at.map(day);
  return at.map((v, i) => (i && day(at[i - 1]) === day(v) ? clock(v) : `${clock(v)}\n${day(v)}`));
};

/* The points that no line reaches, because they have no neighbours. */
page.lonePoints = (values) =>
  [...values.keys()].filter((i) => values[i] != null && values[i - 1] == null && values[i + 1] == null);

/* The numbers of a chart; its rows are made when it is opened. */
page.numbersOf = (title, series, places, xTitle) => {
  const shown = (v) => (v == null ? "" : page.tick(v));
  const columns = [
    { title: xTitle || "x", name: true, value: (i) => i, cell: places },
    ...series.map((s) => ({
      title: s.title,
      right: true,
      value: (i) => (typeof s.values[i] === "number" ? s.values[i] : -Infinity),
      cell: (i) => shown(s.values[i]),
    })),
  ];
  const details = page.el("details", { class: "numbers" }, page.el("summary", {}, "The numbers as a table"));
  const fill = () => details.append(page.table(`${title}: the numbers`, columns, [...series[0].values.keys()]));
  details.addEventListener("toggle", fill, { once: true });
  return details;
};

/* series: [{title, colour, values, dash, loose}]; x: ascending numbers; labels: texts of x, or null; loose: points
   without a line; sparse: see leftOut; wide: a logarithmic axis if the values differ much; table: the caption of a table
   elsewhere in the page that has the numbers. */
page.chart = (
  parent,
  {
    title,
    x,
    labels = null,
    time = false,
    series,
    wide = false,
    height = 240,
    unit = page.tick,
    xTitle = "",
    points = true,
    onpick = null,
    fromZero = false,
    sparse = false,
    table = null,
  },
) => {
  const log = wide && page.wantsLog(series),
    places = (i) => (labels ? labels[i] : page.count(x[i]));
  const figure = page.el("figure", {
    class: "chart",
    role: "img",
    "aria-label": `${title}; ${table ? `the table "${table}"` : "the table below"} has the numbers`,
  });
  const missing = page.leftOut(series, log, places, xTitle || "point", sparse);
  parent.append(
    page.el("h3", {}, title),
    figure,
    missing ? page.el("p", { class: "hint left-out" }, document.createTextNode(missing)) : "",
    table ? "" : page.numbersOf(title, series, places, xTitle),
  );
  const drawn = series.map((s) => s.values.map((v) => (page.whyLeftOut(v, log) ? null : v))),
    data = [x, ...drawn.map((values) => (log ? values.map((v) => (v == null ? null : Math.log10(v))) : values))];
  const ends = [page.smallest(x), page.largest(x)];
  // All points at one place: an axis without extent shows nothing.
  const around = time ? 3600 : 1;
  let plot = null;
  const draw = () => {
    const soft = page.css("--soft"),
      line = page.css("--line");
    const onPanel = (colour) => (page.dark() && colour === "#0072b2" ? "#4ea5e6" : colour);
    const axis = {
      stroke: soft,
      grid: { stroke: line, width: 1 },
      ticks: { stroke: line },
      font: "12px system-ui, sans-serif",
    };
    const write = page.fitter(axis.font);
    plot?.destroy();
    figure.replaceChildren();
    plot = new uPlot(
      {
        width: Math.max(240, figure.clientWidth - 24),
        height,
        padding: [10, labels ? 64 : 40, 0, labels ? 20 : 0],
        scales: {
          x: { time, range: ends[0] === ends[1] ? [ends[0] - around, ends[1] + around] : undefined },
          y: log
            ? { range: (u, low, high) => page.decades(low, high) }
            : {
                range: (u, low, high) => {
                  const room = (high - low || Math.abs(high) || 1) * 0.06;
                  return [fromZero || (low >= 0 && low - room < 0) ? 0 : low - room, high + room];
                },
              },
        },
        axes: [
          {
            ...axis,
            ...(time
              ? {}
              : {
                  incrs: [1, 2, 5]
                    .flatMap((f) => [f, f * 10, f * 100, f * 1e3, f * 1e4, f * 1e5, f * 1e6, f * 1e7])
                    .sort((p, q) => p - q),
                }),
            space: labels ? 110 : time ? 90 : 50,
            label: xTitle || undefined,
            labelSize: 20,
            labelFont: axis.font,
            values: labels
              ? (u, at) =>
                  at.map((v) => (Number.isInteger(v) && labels[v] !== undefined ? page.text(labels[v], 18) : ""))
              : time
                ? (u, at, _, space, step) => page.times(at, step)
                : (u, at) => at.map((v) => page.count(v)),
          },
          {
            ...axis,
            ...(log ? { splits: (u, _, low, high) => page.logTicks(low, high) } : {}),
            size: (u, values) => Math.max(50, 18 + page.largest((values ?? []).map((v) => write.width(v ?? "")), 0)),
            values: (u, at, _, space, step) => at.map((v) => (log ? page.power(v) : unit(v, step))),
          },
        ],
        series: [
          {
            label: xTitle || "x",
            value: (u, v) =>
              v == null
                ? ""
                : labels
                  ? page.text(labels[v] ?? "", 60)
                  : time
                    ? new Date(v * 1000).toISOString().slice(0, 19).replace("T", " ")
                    : page.count(v),
          },
          ...series.map((s, k) => ({
            label: page.text(s.title, 60),
            stroke: onPanel(s.colour),
            width: 2,
            dash: s.dash,
            paths: s.loose ? () => null : undefined,
            points: {
              show: points && (s.loose || ends[0] === ends[1] || data[k + 1].filter((v) => v != null).length < 200),
              filter: (u, at, show) => (show ? null : page.lonePoints(data[at])),
              size: 7,
              fill: onPanel(s.colour),
            },
            value: (u, v, _, i) => (v == null || i == null ? "" : unit(drawn[k][i])),
          })),
        ],
        cursor: { y: false },
        tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      },
      data,
      figure,
    );
    if (onpick)
      plot.over.addEventListener("click", () => {
        if (plot.cursor.idx != null) onpick(plot.cursor.idx);
      });
  };
  page.onredraw(draw, figure);
  draw();
  page.charts.push({ title, data: [x, ...drawn], plot: () => plot });
  return figure;
};

/* The most powers of two that a sketch shows, less one. */
page.WIDEST = 60;

/* The lowest and the highest of counted exponents; if they lie far apart, without those at each end that hold less than
   0.1 % of all values. */
page.bulk = (counts) => {
  const exponents = [...counts.keys()].sort((p, q) => p - q);
  if (!exponents.length) return [0, 0];
  if (exponents.at(-1) - exponents[0] <= page.WIDEST) return [exponents[0], exponents.at(-1)];
  const few = [...counts.values()].reduce((sum, n) => sum + n, 0) / 1000;
  const end = (order) => {
    let passed = 0;
    return order.find((e) => (passed += counts.get(e)) >= few);
  };
  return [end(exponents), end([...exponents].reverse())];
};

/* How many values of a sketch lie outside of its range, as text; "" if none. */
page.beyond = (magnitudes, low, high) => {
  const sum = (held) => held.reduce((total, [, negative, positive]) => total + negative + positive, 0),
    above = sum(magnitudes.filter(([e]) => e > high)),
    below = sum(magnitudes.filter(([e]) => e < low));
  return [
    above ? `${page.plural(above, "value")} of magnitude 2^${high + 1} or more, in the outer bars` : "",
    below ? `${page.plural(below, "value")} of magnitude less than 2^${low}, in the inner bars` : "",
  ]
    .filter(Boolean)
    .join("; ");
};

/* Triangles in a sketch at the bars that hold values outside of its range. */
page.edgeMarks = (magnitudes, low, high, width, bar) => {
  const middle = width / 2;
  const marks = magnitudes.flatMap(([e, negative, positive]) =>
    e > high
      ? [negative ? "M0 4l6 -4v8z" : "", positive ? `M${width} 4l-6 -4v8z` : ""]
      : e < low
        ? [negative ? `M${middle - bar} 4l-6 -4v8z` : "", positive ? `M${middle + bar} 4l6 -4v8z` : ""]
        : [],
  );
  return [...new Set(marks)].join("");
};

/* A small histogram of magnitudes: negative values to the left, positive to the right, small ones in the middle. One
   path for each colour: a table may have thousands. */
page.sketch = (magnitudes, zeros, low, high, { width = 150, height = 26, colour = "#0072b2" } = {}) => {
  const n = Math.max(1, high - low + 1),
    bars = new Array(2 * n + 1).fill(0);
  for (const [e, negative, positive] of magnitudes) {
    const at = Math.min(n - 1, Math.max(0, e - low));
    bars[n - 1 - at] += negative;
    bars[n + 1 + at] += positive;
  }
  bars[n] = zeros;
  const most = page.largest(bars, 1),
    w = width / bars.length;
  const path = (at) =>
    at
      .filter((i) => bars[i])
      .map((i) => {
        const h = Math.max(1, (bars[i] / most) * (height - 1));
        return `M${(i * w).toFixed(1)} ${height}v${-h.toFixed(1)}h${Math.max(0.8, w - 0.4).toFixed(1)}V${height}z`;
      })
      .join("");
  const beyond = page.beyond(magnitudes, low, high),
    marks = beyond ? page.edgeMarks(magnitudes, low, high, width, w) : "";
  const svg = page.el(
    "svg",
    {
      class: "sketch",
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `values by magnitude, from 2 to the ${low} to 2 to the ${high + 1}${beyond ? `; ${beyond}` : ""}`,
    },
    page.el("path", { d: `M${n * w} 0h${Math.max(w, 0.8)}V${height}h${-Math.max(w, 0.8)}z`, class: "zero" }),
    page.el("path", { d: path([...bars.keys()].filter((i) => i !== n)), fill: colour }),
    page.el("path", { d: path([n]), class: "zeros" }),
    marks ? page.el("path", { d: marks, class: "beyond" }) : null,
  );
  return beyond ? page.el("span", { title: beyond }, svg) : svg;
};

/* A table of cells whose colour is a number: rows x columns; value(row, column) is null, a number or a text. */
page.heat = (
  caption,
  rows,
  columns,
  value,
  { log = true, format = (v) => page.number(v, 3), id = "heat", corner = "layer", onpick = null } = {},
) => {
  const numbers = rows
    .flatMap((r) => columns.map((c) => value(r, c)))
    .filter((v) => typeof v === "number" && v > 0 && Number.isFinite(v));
  const scale = log ? Math.log : (v) => v,
    low = numbers.length ? scale(page.smallest(numbers)) : 0,
    high = numbers.length ? scale(page.largest(numbers)) : 1;
  const cell = (r, c) => {
    const v = value(r, c);
    const td = page.el(
      "td",
      { class: "right" },
      v == null ? "" : typeof v === "string" ? v : v === 0 ? "equal" : Number.isFinite(v) ? format(v) : "∞",
    );
    if (typeof v === "number" && v > 0) {
      const t = !Number.isFinite(v) ? 1 : high > low ? (scale(v) - low) / (high - low) : 0.6,
        colour = page.ramp(t, 0.1, 0.97);
      td.style.background = colour;
      td.style.color = page.ink(colour);
    }
    if (onpick && v != null) {
      td.style.cursor = "pointer";
      td.addEventListener("click", () => onpick(r, c));
    }
    return td;
  };
  const table = page.el(
    "table",
    { class: "heat" },
    page.el("caption", {}, caption),
    page.el(
      "thead",
      {},
      page.el(
        "tr",
        {},
        page.el("th", { scope: "col" }, corner),
        columns.map((c) => page.el("th", { scope: "col", class: "right" }, page.text(c, 40))),
      ),
    ),
    page.el(
      "tbody",
      {},
      rows.map((r) =>
        page.el(
          "tr",
          {},
          page.el("th", { scope: "row", class: "name" }, page.text(r, 80)),
          columns.map((c) => cell(r, c)),
        ),
      ),
    ),
  );
  return page.el("div", { id, class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
};
