/* What the files of a checkpoint spend their bytes on: a treemap, by d3-hierarchy, and tables. */
page.USES = [
  ["masters", "master weights", "#0072b2"],
  ["moments", "optimizer states", "#e69f00"],
  ["copies", "the model's copy", "#009e73"],
  ["buffers", "buffers", "#cc79a7"],
  ["replicas", "replicas", "#56b4e9"],
  ["padding", "padding", "#b3b8c2"],
  ["overhead", "overhead", "#7d8490"],
];

page.Files = class {
  constructor(data, main) {
    this.data = data;
    this.files = data.layout.files;
    this.usage = data.layout.usage;
    this.uses = page.USES.filter(([key]) => this.usage[key].some((n) => n > 0));
    this.figure = page.el("figure", { class: "chart", role: "group", "aria-label": "Treemap of the files" });
    const total = this.files.reduce((sum, f) => sum + f.nbytes, 0) || 1;
    const bytes = this.uses.map(([key, title, colour]) => ({
      title,
      colour,
      nbytes: this.usage[key].reduce((a, b) => a + b, 0),
    }));
    const bar = (d) => {
      const i = page.el("i", { class: "bar", "aria-hidden": "true" });
      i.style.width = `${(d.nbytes / total) * 220}px`;
      i.style.background = d.colour;
      return i;
    };
    const table = page.table(
      "What the bytes of the files are spent on",
      [
        { title: "spent on", value: (d) => d.title },
        { title: "", value: () => "", cell: bar },
        { title: "size", right: true, value: (d) => d.nbytes, cell: (d) => page.size(d.nbytes) },
        {
          title: "share",
          right: true,
          value: (d) => d.nbytes,
          cell: (d) => ((100 * d.nbytes) / total).toFixed(1) + " %",
        },
      ],
      bytes,
      { id: "spent" },
    );
    const columns = [
      { title: "file", name: true, value: (i) => this.files[i].name },
      { title: "states of", value: (i) => this.files[i].kind },
      { title: "rank", right: true, value: (i) => this.files[i].rank ?? -1, cell: (i) => this.files[i].rank ?? "all" },
      { title: "size", right: true, value: (i) => this.files[i].nbytes, cell: (i) => page.size(this.files[i].nbytes) },
      ...this.uses.map(([key, title]) => ({
        title,
        right: true,
        value: (i) => this.usage[key][i],
        cell: (i) => (this.usage[key][i] ? page.size(this.usage[key][i]) : ""),
      })),
    ];
    main.append(
      page.section(
        "Files",
        this.figure,
        table,
        page.el(
          "details",
          {},
          page.el("summary", {}, this.files.length === 1 ? "The file" : `All ${page.count(this.files.length)} files`),
          page.table(
            "Files",
            columns,
            this.files.map((_, i) => i),
            { limit: 200, id: "files" },
          ),
        ),
      ),
    );
    this.draw = this.draw.bind(this);
    page.onredraw(this.draw, this.figure);
    this.draw();
  }

  /* Files by what they hold; many files of one kind are one box. */
  tree() {
    const kinds = new Map();
    this.files.forEach((f, i) => kinds.set(f.kind, [...(kinds.get(f.kind) ?? []), i]));
    const leaves = (indices) =>
      this.uses
        .map(([key, title, colour]) => ({
          title,
          colour,
          key,
          value: indices.reduce((sum, i) => sum + this.usage[key][i], 0),
        }))
        .filter((leaf) => leaf.value > 0);
    const many = this.files.length > 24;
    return {
      children: [...kinds].flatMap(([kind, indices]) =>
        many
          ? [{ title: `${kind}: ${page.plural(indices.length, "file")}`, children: leaves(indices) }]
          : indices.map((i) => ({ title: this.files[i].name, children: leaves([i]) })),
      ),
    };
  }

  draw() {
    const width = Math.max(260, this.figure.clientWidth - 24),
      height = width < 600 ? 420 : 340;
    const root = d3
      .hierarchy(this.tree())
      .sum((d) => (d.children ? 0 : d.value || 0))
      .sort((a, b) => b.value - a.value);
    d3
      .treemap()
      .size([width, height])
      .paddingOuter(3)
      .paddingTop((n) => (n.depth === 1 ? 18 : 3))
      .paddingInner(2)
      .round(true)(root);
    const svg = page.el("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "group",
      "aria-label":
        "Treemap: the area of a box is the number of bytes; the table below has the numbers. Arrow keys go from box to box",
    });
    const defs = page.el("defs");
    const hatch = page.el(
      "pattern",
      { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      page.el("path", { d: "M-1 7L7 -1M-1 1L1 -1M5 7L7 5", stroke: "rgba(0,0,0,.45)", "stroke-width": 1.2 }),
    );
    defs.append(hatch);
    svg.append(defs);
    const fit = page.fitter("12px system-ui, sans-serif");
    for (const node of root.children ?? []) {
      const w = node.x1 - node.x0,
        h = node.y1 - node.y0;
      svg.append(
        page.el("rect", {
          x: node.x0,
          y: node.y0,
          width: w,
          height: h,
          fill: page.css("--page"),
          stroke: page.css("--line"),
          rx: 3,
        }),
      );
      if (h > 20)
        svg.append(
          page.el(
            "text",
            { x: node.x0 + 5, y: node.y0 + 13, fill: page.css("--text") },
            fit(`${node.data.title}`, w - 10),
          ),
        );
      for (const leaf of node.leaves()) if (leaf !== node) svg.append(this.leaf(leaf, node, fit));
    }
    page.oneStop(svg);
    this.figure.replaceChildren(svg);
  }

  leaf(leaf, node, fit) {
    const w = leaf.x1 - leaf.x0,
      h = leaf.y1 - leaf.y0,
      { colour, title, key } = leaf.data;
    const tell = (e) => {
      const box = e.currentTarget.getBoundingClientRect();
      page.tip.show(e.clientX ?? box.left, e.clientY ?? box.bottom, node.data.title, [
        ["spent on", title],
        ["bytes", `${page.count(leaf.value)} (${page.size(leaf.value)})`],
        ["share", `${((100 * leaf.value) / node.value).toFixed(1)} % of the box`],
      ]);
    };
    const g = page.el("g", {
      class: "leaf",
      role: "img",
      "aria-label": `${page.text(node.data.title)}, ${title}: ${page.size(leaf.value)}`,
      onpointermove: tell,
      onpointerleave: () => page.tip.hide(),
      onfocus: tell,
      onblur: () => page.tip.hide(),
    });
    g.append(page.el("rect", { x: leaf.x0, y: leaf.y0, width: w, height: h, fill: colour, rx: 2 }));
    if (key === "padding" || key === "overhead")
      g.append(
        page.el("rect", { x: leaf.x0, y: leaf.y0, width: w, height: h, fill: "url(#hatch)", "pointer-events": "none" }),
      );
    const plain = !(key === "padding" || key === "overhead");
    const label = h > 16 && w > 40 ? fit(title, w - 8) : "";
    if (label) {
      if (!plain)
        g.append(
          page.el("rect", {
            x: leaf.x0 + 2,
            y: leaf.y0 + 2,
            width: Math.min(
              w - 4,
              fit.width(label) + 8,
              Math.max(fit.width(label), h > 32 ? fit.width(page.size(leaf.value)) : 0) + 8,
            ),
            height: Math.min(h - 4, h > 32 ? 31 : 16),
            fill: colour,
          }),
        );
      g.append(page.el("text", { x: leaf.x0 + 5, y: leaf.y0 + 14, fill: page.ink(colour) }, label));
      if (h > 32)
        g.append(
          page.el(
            "text",
            { x: leaf.x0 + 5, y: leaf.y0 + 29, fill: page.ink(colour), opacity: 0.9 },
            fit(page.size(leaf.value), w - 8),
          ),
        );
    }
    return g;
  }
};
