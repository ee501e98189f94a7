/* Charts over steps or layers, by uPlot, in the colours of the page. */
page.charts = [];

/* What a chart has no place for, as a sentence; "" if it shows all values. A value that is not known is null. */
page.leftOut = (series, log) => {
  const values = series.flatMap((s) => s.values).filter((v) => v != null);
  const odd = values.filter((v) => typeof v !== "number" || !Number.isFinite(v)).length,
    low = log ? values.filter((v) => typeof v === "number" && Number.isFinite(v) && v <= 0).length : 0;
  const parts = [
    odd ? `${page.plural(odd, "value")} that ${odd === 1 ? "is" : "are"} NaN or infinite` : "",
    low ? `${page.plural(low, "value")} of 0 or less, which a logarithmic axis has no place for` : "",
  ].filter(Boolean);
  return parts.length ? `Not in this chart: ${parts.join("; ")}.` : "";
};

/* The powers of ten around positive numbers; uPlot's own fail for very small ones. */
page.decades = (low, high) => {
  if (low == null || !(high > 0)) return [0.1, 10];
  const from = Math.floor(Math.log10(low) + 1e-9),
    to = Math.ceil(Math.log10(high) - 1e-9);
  return [10 ** from, 10 ** Math.max(to, from + 1)];
};
page.logTicks = (low, high) => {
  const from = Math.round(Math.log10(low)),
    to = Math.round(Math.log10(high)),
    step = Math.max(1, Math.ceil((to - from) / 8));
  const ticks = [];
  for (let k = from; k <= to; k += step) {
    ticks.push(10 ** k);
    if (to - from < 2 && k < to) ticks.push(2 * 10 ** k, 5 * 10 ** k);
  }
  return ticks;
};

/* series: [{title, colour, values, dash, loose}]; x: ascending numbers; labels: texts of x, or null; log: a logarithmic
   axis; loose: points without a line. */
page.chart = (
  parent,
  {
    title,
    x,
    labels = null,
    time = false,
    series,
    log = false,
    height = 240,
    unit = (v) => page.number(v, 4),
    xTitle = "",
    points = true,
    onpick = null,
    fromZero = false,
  },
) => {
  const figure = page.el("figure", {
    class: "chart",
    role: "img",
    "aria-label": `${title}; the table has the numbers`,
  });
  const missing = page.leftOut(series, log);
  parent.append(page.el("h3", {}, title), figure, missing ? page.el("p", { class: "hint left-out" }, missing) : "");
  const data = [
    x,
    ...series.map((s) =>
      s.values.map((v) => (typeof v === "number" && Number.isFinite(v) && (!log || v > 0) ? v : null)),
    ),
  ];
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
            ? { distr: 3, range: (u, low, high) => page.decades(low, high) }
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
            space: labels ? 110 : 50,
            label: xTitle || undefined,
            labelSize: 20,
            labelFont: axis.font,
            values: labels
              ? (u, at) =>
                  at.map((v) => (Number.isInteger(v) && labels[v] !== undefined ? page.text(labels[v], 18) : ""))
              : time
                ? undefined
                : (u, at) => at.map((v) => page.count(v)),
          },
          {
            ...axis,
            ...(log ? { splits: (u, _, low, high) => page.logTicks(low, high) } : {}),
            size: (u, values) => Math.max(50, 18 + page.largest((values ?? []).map((v) => write.width(v ?? "")), 0)),
            values: (u, at) => at.map((v) => (v == null ? "" : unit(v))),
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
            spanGaps: true,
            paths: s.loose ? () => null : undefined,
            points: {
              show: points && (s.loose || ends[0] === ends[1] || data[k + 1].filter((v) => v != null).length < 200),
              size: 7,
              fill: onPanel(s.colour),
            },
            value: (u, v) => (v == null ? "" : unit(v)),
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
  page.charts.push({ title, plot: () => plot });
  return figure;
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
  const svg = page.el(
    "svg",
    {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `values by magnitude, from 2 to the ${low} to 2 to the ${high + 1}`,
    },
    page.el("path", { d: `M${n * w} 0h${Math.max(w, 0.8)}V${height}h${-Math.max(w, 0.8)}z`, class: "zero" }),
    page.el("path", { d: path([...bars.keys()].filter((i) => i !== n)), fill: colour }),
    page.el("path", { d: path([n]), class: "zeros" }),
  );
  return svg;
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
