/* The page of one checkpoint: facts, layout, files, tables. */
page.USES = [["masters", "master weights", "#0072b2"], ["moments", "optimizer states", "#e69f00"], ["copies", "the model's copy", "#009e73"], ["buffers", "buffers", "#cc79a7"],
  ["replicas", "replicas", "#56b4e9"], ["padding", "padding", "#b3b8c2"], ["overhead", "overhead", "#7d8490"]];

page.Files = class {
  constructor(data, main) {
    this.data = data;
    this.files = data.layout.files;
    this.usage = data.layout.usage;
    this.uses = page.USES.filter(([key]) => this.usage[key].some((n) => n > 0));
    this.figure = page.el("figure", { class: "chart", role: "group", "aria-label": "Treemap of the files" });
    const total = this.files.reduce((sum, f) => sum + f.nbytes, 0) || 1;
    const bytes = this.uses.map(([key, title, colour]) => ({ title, colour, nbytes: this.usage[key].reduce((a, b) => a + b, 0) }));
    const bar = (d) => { const i = page.el("i", { class: "bar", "aria-hidden": "true" }); i.style.width = `${(d.nbytes / total) * 220}px`; i.style.background = d.colour; return i; };
    const table = page.table("What the bytes of the files are spent on", [{ title: "spent on", value: (d) => d.title }, { title: "", value: () => "", cell: bar },
      { title: "size", right: true, value: (d) => d.nbytes, cell: (d) => page.size(d.nbytes) }, { title: "share", right: true, value: (d) => d.nbytes, cell: (d) => ((100 * d.nbytes) / total).toFixed(1) + " %" }], bytes, { id: "spent" });
    const columns = [{ title: "file", name: true, value: (i) => this.files[i].name }, { title: "states of", value: (i) => this.files[i].kind }, { title: "rank", right: true, value: (i) => this.files[i].rank ?? -1, cell: (i) => this.files[i].rank ?? "all" },
      { title: "size", right: true, value: (i) => this.files[i].nbytes, cell: (i) => page.size(this.files[i].nbytes) },
      ...this.uses.map(([key, title]) => ({ title, right: true, value: (i) => this.usage[key][i], cell: (i) => (this.usage[key][i] ? page.size(this.usage[key][i]) : "") }))];
    main.append(page.section("Files", this.figure, table, page.el("details", {}, page.el("summary", {}, `All ${page.count(this.files.length)} files`), page.table("Files", columns, this.files.map((_, i) => i), { limit: 200, id: "files" }))));
    this.draw = this.draw.bind(this);
    page.onredraw(this.draw, this.figure);
    this.draw();
  }

  /* Files by what they hold; many files of one kind are one box. */
  tree() {
    const kinds = new Map();
    this.files.forEach((f, i) => kinds.set(f.kind, [...(kinds.get(f.kind) ?? []), i]));
    const leaves = (indices) => this.uses.map(([key, title, colour]) => ({ title, colour, key, value: indices.reduce((sum, i) => sum + this.usage[key][i], 0) })).filter((leaf) => leaf.value > 0);
    const many = this.files.length > 24;
    return { children: [...kinds].flatMap(([kind, indices]) => (many ? [{ title: `${kind}: ${page.count(indices.length)} files`, children: leaves(indices) }] : indices.map((i) => ({ title: this.files[i].name, children: leaves([i]) })))) };
  }

  draw() {
    const width = Math.max(260, this.figure.clientWidth - 24), height = width < 600 ? 420 : 340;
    const root = d3.hierarchy(this.tree()).sum((d) => (d.children ? 0 : d.value || 0)).sort((a, b) => b.value - a.value);
    d3.treemap().size([width, height]).paddingOuter(3).paddingTop((n) => (n.depth === 1 ? 18 : 3)).paddingInner(2).round(true)(root);
    const svg = page.el("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Treemap: the area of a box is the number of bytes; the table below has the numbers" });
    const defs = page.el("defs");
    const hatch = page.el("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" }, page.el("path", { d: "M-1 7L7 -1M-1 1L1 -1M5 7L7 5", stroke: "rgba(0,0,0,.45)", "stroke-width": 1.2 }));
    defs.append(hatch);
    svg.append(defs);
    const fit = page.fitter("12px system-ui, sans-serif");
    for (const node of root.children ?? []) {
      const w = node.x1 - node.x0, h = node.y1 - node.y0;
      svg.append(page.el("rect", { x: node.x0, y: node.y0, width: w, height: h, fill: page.css("--page"), stroke: page.css("--line"), rx: 3 }));
      if (h > 20) svg.append(page.el("text", { x: node.x0 + 5, y: node.y0 + 13, fill: page.css("--text") }, fit(`${node.data.title}`, w - 10)));
      for (const leaf of node.leaves()) if (leaf !== node) svg.append(this.leaf(leaf, node, fit));
    }
    this.figure.replaceChildren(svg);
  }

  leaf(leaf, node, fit) {
    const w = leaf.x1 - leaf.x0, h = leaf.y1 - leaf.y0, { colour, title, key } = leaf.data;
    const tell = (e) => { const box = e.currentTarget.getBoundingClientRect(); page.tip.show(e.clientX ?? box.left, e.clientY ?? box.bottom, node.data.title, [["spent on", title], ["bytes", `${page.count(leaf.value)} (${page.size(leaf.value)})`], ["share", `${((100 * leaf.value) / node.value).toFixed(1)} % of the box`]]); };
    const g = page.el("g", { class: "leaf", tabindex: "0", role: "img", "aria-label": `${page.text(node.data.title)}, ${title}: ${page.size(leaf.value)}`, onpointermove: tell, onpointerleave: () => page.tip.hide(), onfocus: tell, onblur: () => page.tip.hide() });
    g.append(page.el("rect", { x: leaf.x0, y: leaf.y0, width: w, height: h, fill: colour, rx: 2 }));
    if (key === "padding" || key === "overhead") g.append(page.el("rect", { x: leaf.x0, y: leaf.y0, width: w, height: h, fill: "url(#hatch)", "pointer-events": "none" }));
    const plain = !(key === "padding" || key === "overhead");
    const label = h > 16 && w > 40 ? fit(title, w - 8) : "";
    if (label) {
      if (!plain) g.append(page.el("rect", { x: leaf.x0 + 2, y: leaf.y0 + 2, width: Math.min(w - 4, fit.width(label) + 8, Math.max(fit.width(label), h > 32 ? fit.width(page.size(leaf.value)) : 0) + 8), height: Math.min(h - 4, h > 32 ? 31 : 16), fill: colour }));
      g.append(page.el("text", { x: leaf.x0 + 5, y: leaf.y0 + 14, fill: page.ink(colour) }, label));
      if (h > 32) g.append(page.el("text", { x: leaf.x0 + 5, y: leaf.y0 + 29, fill: page.ink(colour), opacity: 0.9 }, fit(page.size(leaf.value), w - 8)));
    }
    return g;
  }
};

views.checkpoint = (data, main) => {
  const c = data.checkpoint, t = c.topology;
  const trained = c.parameters.filter((p) => !p.frozen), frozen = c.parameters.filter((p) => p.frozen);
  const sum = (ps) => ps.reduce((total, p) => total + p.numel, 0);
  const count = (ps) => ps.reduce((total, p) => total + (p.count ?? 1), 0);
  page.head(c.tag, `${data.about}. ${c.location}`, [
    ["parameters", sum(c.parameters) < 1e6 ? page.count(sum(c.parameters)) : page.short(sum(c.parameters)), `${page.count(count(c.parameters))} tensors${frozen.length ? `, ${page.count(count(frozen))} frozen` : ""}`],
    ["files", page.count(data.counts.files), page.size(c.nbytes)],
    ["ranks", c.stage == null ? "" : page.count(t.data_parallel * t.tensor_parallel * t.pipeline_parallel), [["data", t.data_parallel], ["tensor", t.tensor_parallel], ["pipeline", t.pipeline_parallel], ["expert", t.expert_parallel]].filter(([, n]) => n > 1).map(([k, n]) => `${k} ${n}`).join(", ")],
    ["format", c.stage != null ? (c.stage ? `ZeRO-${c.stage}` : "ZeRO off") : c.format, page.dtype(c.dtype)],
    ["step", c.step == null ? "" : page.count(c.step), c.skipped_steps ? `${page.count(c.skipped_steps)} skipped` : ""],
    ["extents", page.count(data.layout.extents), data.layout.folded ? "folded by name" : ""],
    ["DeepSpeed", c.deepspeed_version ?? ""]]);
  if (data.findings) main.append(page.findings(data.findings));
  main.append(...[...c.notes, ...c.remarks, ...data.omitted].map((note) => page.el("p", { class: "note" }, page.text(note, 2000))));
  const layout = new page.Layout(data), view = new page.LayoutView(layout, main);
  new page.Files(data, main);
  page.parameters(data, main, view);
  page.groups(c, main);
  for (const [title, value] of [["Client state", c.client_state], ["Scheduler", c.scheduler], ["Loss scaler", c.loss_scaler], ["Configuration of the run", c.ds_config]]) {
    if (value == null || (typeof value === "object" && !Object.keys(value).length)) continue;
    main.append(page.el("details", {}, page.el("summary", {}, title), page.el("pre", {}, document.createTextNode(JSON.stringify(value, null, 2).split("\n").map((line) => page.text(line, 2000)).join("\n")))));
  }
  page.state = { layout, view };
};

page.findings = (findings) => page.section("Findings of verify", findings.length ? findings.map((f) => page.el("p", { class: "note bad" }, page.el("span", { class: "name" }, page.text(f.path, 600)), `: ${page.text(f.problem, 1000)}${f.hint ? `; ${page.text(f.hint, 1000)}` : ""}`))
  : page.el("p", { class: "note good" }, "None: the structure is sound, and samples of the copies agree."));

page.parameters = (data, main, view) => {
  const { tensors, layers } = data.layout, c = data.checkpoint;
  const states = (i) => Object.entries(i < c.parameters.length ? c.parameters[i].states : { buffer: c.buffers[i - c.parameters.length] });
  const columns = [
    { title: "parameter", name: true, value: (i) => tensors.name[i], cell: (i) => page.el("button", { class: "link", type: "button", onclick: () => { view.choose(i); view.canvas.scrollIntoView({ block: "center" }); } }, tensors.name[i]) },
    { title: "shape", value: (i) => page.shape(tensors.shape[i]), cell: (i) => (tensors.count[i] > 1 ? `${page.count(tensors.count[i])} tensors` : page.shape(tensors.shape[i])) },
    { title: "elements", right: true, value: (i) => tensors.numel[i], cell: (i) => page.count(tensors.numel[i]) },
    { title: "kind", value: (i) => [tensors.kind[i], tensors.expert[i] ? "expert" : "", tensors.tied[i] ? "tied" : ""].filter(Boolean).join(", ") },
    { title: "group", right: true, value: (i) => tensors.group[i], cell: (i) => (tensors.group[i] < 0 ? "" : String(tensors.group[i])) },
    { title: "layer", value: (i) => tensors.layer[i], cell: (i) => page.text(layers[tensors.layer[i]], 60) },
    { title: "states", value: (i) => states(i).length, cell: (i) => states(i).map(([k, s]) => (k === page.dtype(s.dtype) ? k : `${k} ${page.dtype(s.dtype)}`)).join(", ") }];
  const all = tensors.name.map((_, i) => i);
  view.table = page.table("Parameters and buffers", columns, all, { limit: 200, id: "parameters" });
  view.table.all = all;
  main.append(page.section("Parameters", view.table));
};

page.groups = (c, main) => {
  if (!c.groups.length) return;
  const numel = new Map(c.parameters.map((p) => [p.name, p.numel]));
  const keys = [...new Set(c.groups.flatMap((g) => Object.keys(g.hyperparameters)))].filter((k) => c.groups.some((g) => g.hyperparameters[k] !== null)).slice(0, 14);
  const shown = (v) => (v == null ? "" : Array.isArray(v) ? `(${v.map((x) => page.number(x)).join(", ")})` : typeof v === "number" ? page.number(v) : typeof v === "object" ? "…" : String(v));
  const columns = [{ title: "group", value: (i) => i, cell: String }, { title: "parameters", right: true, value: (i) => c.groups[i].count ?? c.groups[i].parameters.length, cell: (i) => page.count(c.groups[i].count ?? c.groups[i].parameters.length) },
    { title: "elements", right: true, value: (i) => c.groups[i].parameters.reduce((s, n) => s + (numel.get(n) ?? 0), 0), cell: (i) => { const n = c.groups[i].parameters.reduce((s, name) => s + (numel.get(name) ?? 0), 0); return n ? page.count(n) : ""; } },
    ...keys.map((k) => ({ title: k, right: true, value: (i) => shown(c.groups[i].hyperparameters[k]) })),
    { title: "optimizer", value: (i) => Object.entries(c.groups[i].scalars).map(([k, s]) => `${k} ${shown(s.value)}`).join(", ") }];
  main.append(page.section("Parameter groups", page.table("Parameter groups of the optimizer", columns, c.groups.map((_, i) => i), { id: "groups" })));
};

/* A checkpoint that cannot be opened: what verify found, and the files that are there. */
views.damaged = (data, main) => {
  const { findings, files } = data;
  page.head("cannot be opened as a checkpoint", data.location, [["findings", page.count(findings.length)], ["files", page.count(files.length)], ["size", page.size(files.reduce((sum, f) => sum + f[1], 0))]]);
  main.append(page.findings(findings));
  const columns = [{ title: "file", name: true, value: (f) => f[0] }, { title: "size", right: true, value: (f) => f[1], cell: (f) => page.size(f[1]) }];
  main.append(page.section("Files that are there", page.table("Files", columns, files, { id: "files" })));
};
