/* The page of a dry run: what would move from which file to which. */
views.plan = (data, main) => {
  const { report, moves, sources, targets, files } = data,
    known = new Set(targets),
    made = files.filter(([name]) => !known.has(name));
  const short = (path) => path.split("/").at(-1);
  page.head(data.title, `A dry run: nothing was written. ${report.out} would be made.`, [
    ["read", page.size(report.nbytes_read), "with comparisons"],
    ["written", page.size(report.nbytes_written)],
    ["files read", page.count(sources.length)],
    ["files written", page.count(files.length), made.length ? `${page.count(made.length)} without tensors of the source` : ""],
    ["moves", page.count(moves.length)],
  ]);
  main.append(...(report.notes ?? []).map((n) => page.el("p", { class: "note" }, page.text(n, 2000))));
  const totals = [sources.map(() => 0), targets.map(() => 0)];
  for (const [s, t, n] of moves) {
    totals[0][s] += n;
    totals[1][t] += n;
  }
  const total = (index, at) => totals[index][at];
  const section = page.section("What moves"),
    figure = page.el("figure", {
      class: "chart",
      role: "group",
      "aria-label":
        "Files that are read to the left, files that would be written to the right; the table has the numbers",
    });
  section.append(
    page.el(
      "p",
      { class: "hint" },
      "Each band goes from a file that is read to one that would be written; its width is the number of bytes. Hover a band or a file.",
    ),
    figure,
  );
  main.append(section);
  const fold = (names, index) => {
    const sums = names
      .map((name, i) => ({ name: short(name), nbytes: total(index, i), at: [i] }))
      .filter((d) => d.nbytes > 0);
    if (sums.length <= 40) return sums;
    const groups = new Map(),
      size = Math.ceil(sums.length / 32);
    sums.forEach((d, i) => {
      const key = Math.floor(i / size),
        g = groups.get(key) ?? { name: "", nbytes: 0, at: [], first: d.name };
      g.nbytes += d.nbytes;
      g.at.push(...d.at);
      g.name = `${g.at.length} files: ${g.first}`;
      groups.set(key, g);
    });
    return [...groups.values()];
  };
  const left = fold(sources, 0),
    right = fold(targets, 1);
  const flows = new Map();
  const of = (side) => new Map(side.flatMap((d, i) => d.at.map((at) => [at, i])));
  const leftOf = of(left),
    rightOf = of(right);
  for (const [s, t, n] of moves) {
    const key = `${leftOf.get(s)} ${rightOf.get(t)}`;
    flows.set(key, (flows.get(key) ?? 0) + n);
  }
  const draw = () => {
    const width = Math.max(260, figure.clientWidth - 24),
      rows = Math.max(left.length, right.length),
      height = Math.max(140, Math.min(900, rows * 30)),
      gap = Math.min(8, height / rows / 4);
    const node = width < 600 ? 84 : Math.min(430, width * 0.33),
      fit = page.fitter("12px system-ui, sans-serif"),
      svg = page.el("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
    const place = (side) => {
      const sum = side.reduce((s, d) => s + d.nbytes, 0) || 1,
        room = height - gap * (side.length - 1);
      let y = 0;
      return side.map((d) => {
        const h = (d.nbytes / sum) * room,
          box = { y, h, used: 0 };
        y += h + gap;
        return box;
      });
    };
    const l = place(left),
      r = place(right),
      text = page.css("--text"),
      paths = [];
    const highlight = (test) => paths.forEach(([p, i, j]) => p.setAttribute("fill-opacity", test(i, j) ? 0.75 : 0.07)),
      plain = () => {
        page.tip.hide();
        paths.forEach(([p]) => p.setAttribute("fill-opacity", 0.4));
      };
    const sorted = [...flows]
      .map(([key, n]) => [...key.split(" ").map(Number), n])
      .sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    for (const [i, j, n] of sorted) {
      const a = (n / left[i].nbytes) * l[i].h,
        b = (n / right[j].nbytes) * r[j].h,
        y0 = l[i].y + l[i].used,
        y1 = r[j].y + r[j].used,
        x0 = node,
        x1 = width - node,
        mid = (x0 + x1) / 2;
      l[i].used += a;
      r[j].used += b;
      const path = page.el("path", {
        d: `M${x0} ${y0}C${mid} ${y0} ${mid} ${y1} ${x1} ${y1}L${x1} ${y1 + b}C${mid} ${y1 + b} ${mid} ${y0 + a} ${x0} ${y0 + a}Z`,
        fill: page.PALETTE[i % 7],
        "fill-opacity": 0.4,
        onpointermove: (e) => {
          page.tip.show(e.clientX, e.clientY, left[i].name, [
            ["to", right[j].name],
            ["bytes", `${page.count(n)} (${page.size(n)})`],
          ]);
          highlight((p, q) => p === i && q === j);
        },
        onpointerleave: plain,
      });
      paths.push([path, i, j]);
      svg.append(path);
    }
    const box = (d, b, i, x, isLeft) => {
      const g = page.el("g", {
        class: "leaf",
        role: "img",
        "aria-label": `${page.text(d.name)}: ${page.size(d.nbytes)}`,
        onpointermove: (e) => {
          page.tip.show(e.clientX, e.clientY, d.name, [[isLeft ? "read" : "written", page.size(d.nbytes)]]);
          highlight((p, q) => (isLeft ? p : q) === i);
        },
        onpointerleave: plain,
        onfocus: () => highlight((p, q) => (isLeft ? p : q) === i),
        onblur: plain,
      });
      g.append(
        page.el("rect", {
          x,
          y: b.y,
          width: node,
          height: Math.max(b.h, 1),
          rx: 3,
          fill: isLeft ? page.PALETTE[i % 7] : page.css("--line"),
        }),
      );
      if (b.h > 13) {
        const fill = isLeft ? page.ink(page.PALETTE[i % 7]) : text,
          nbytes = page.size(d.nbytes),
          room = node - 24 - fit.width(nbytes),
          y = b.y + b.h / 2 + 4;
        const name = room > 60 ? fit(d.name, room) : "";
        if (name) g.append(page.el("text", { x: x + 6, y, fill }, name));
        if (fit.width(nbytes) < node - 8)
          g.append(page.el("text", { x: x + node - 7, y, fill, "text-anchor": "end" }, nbytes));
      }
      svg.append(g);
    };
    left.forEach((d, i) => box(d, l[i], i, 0, true));
    right.forEach((d, i) => box(d, r[i], i, width - node, false));
    page.oneStop(svg);
    figure.replaceChildren(svg);
  };
  page.onredraw(draw, figure);
  draw();
  const copied = new Map(targets.map((name, i) => [name, totals[1][i]]));
  const written = [
    { title: "file", name: true, value: (f) => f[0] },
    { title: "size", right: true, value: (f) => f[1], cell: (f) => page.count(f[1]) },
    {
      title: "read for it",
      right: true,
      value: (f) => copied.get(f[0]) ?? 0,
      cell: (f) => (copied.has(f[0]) ? page.count(copied.get(f[0])) : "made without tensors of the source"),
    },
  ];
  main.append(
    page.section(
      "Files that would be written",
      page.table("Size of each file, and bytes of tensors that are read for it", written, files, { id: "written", limit: 300 }),
    ),
  );
  const columns = [
    { title: "read from", name: true, value: (m) => sources[m[0]], cell: (m) => short(sources[m[0]]) },
    { title: "written to", name: true, value: (m) => targets[m[1]] },
    { title: "bytes", right: true, value: (m) => m[2], cell: (m) => page.count(m[2]) },
  ];
  main.append(
    page.section(
      "All moves",
      page.table("Bytes from each file to each file", columns, moves, { id: "moves", limit: 300 }),
    ),
  );
};
