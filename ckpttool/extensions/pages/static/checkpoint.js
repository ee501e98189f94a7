/* The page of one checkpoint: facts, layout, files, tables. */
views.checkpoint = (data, main) => {
  const c = data.checkpoint,
    t = c.topology;
  const trained = c.parameters.filter((p) => !p.frozen),
    frozen = c.parameters.filter((p) => p.frozen);
  const sum = (ps) => ps.reduce((total, p) => total + p.numel, 0);
  const count = (ps) => ps.reduce((total, p) => total + (p.count ?? 1), 0);
  page.head(c.tag, `${data.about}. ${c.location}`, [
    [
      "parameters",
      sum(c.parameters) < 1e6 ? page.count(sum(c.parameters)) : page.short(sum(c.parameters)),
      `${page.plural(count(c.parameters), "tensor")}${frozen.length ? `, ${page.count(count(frozen))} frozen` : ""}`,
    ],
    ["files", page.count(data.counts.files), page.size(c.nbytes)],
    [
      "ranks",
      c.stage == null ? "" : page.count(t.data_parallel * t.tensor_parallel * t.pipeline_parallel),
      [
        ["data", t.data_parallel],
        ["tensor", t.tensor_parallel],
        ["pipeline", t.pipeline_parallel],
        ["expert", t.expert_parallel],
      ]
        .filter(([, n]) => n > 1)
        .map(([k, n]) => `${k} ${n}`)
        .join(", "),
    ],
    ["format", c.stage != null ? (c.stage ? `ZeRO-${c.stage}` : "ZeRO off") : c.format, page.dtype(c.dtype)],
    ["step", c.step == null ? "" : page.count(c.step), c.skipped_steps ? `${page.count(c.skipped_steps)} skipped` : ""],
    ["extents", page.count(data.layout.extents), data.layout.folded ? "folded by name" : ""],
    ["DeepSpeed", c.deepspeed_version ?? ""],
  ]);
  if (data.findings) main.append(page.findings(data.findings));
  main.append(
    ...[...c.notes, ...c.remarks, ...data.omitted].map((note) =>
      page.el("p", { class: "note" }, page.text(note, 2000)),
    ),
  );
  const layout = new page.Layout(data),
    view = new page.LayoutView(layout, main);
  new page.Files(data, main);
  page.parameters(data, main, view);
  page.groups(c, main);
  for (const [title, value] of [
    ["Client state", c.client_state],
    ["Scheduler", c.scheduler],
    ["Loss scaler", c.loss_scaler],
    ["Configuration of the run", c.ds_config],
  ]) {
    if (value == null || (typeof value === "object" && !Object.keys(value).length)) continue;
    main.append(
      page.el(
        "details",
        {},
        page.el("summary", {}, title),
        page.el(
          "pre",
          {},
          document.createTextNode(
            JSON.stringify(value, null, 2)
              .split("\n")
              .map((line) => page.text(line, 2000))
              .join("\n"),
          ),
        ),
      ),
    );
  }
  page.state = { layout, view };
};

page.findings = (findings) =>
  page.section(
    "Findings of verify",
    findings.length
      ? findings.map((f) =>
          page.el(
            "p",
            { class: "note bad" },
            page.el("span", { class: "name" }, page.text(f.path, 600)),
            `: ${page.text(f.problem, 1000)}${f.hint ? `; ${page.text(f.hint, 1000)}` : ""}`,
          ),
        )
      : page.el("p", { class: "note good" }, "None: the structure is sound, and samples of the copies agree."),
  );

page.parameters = (data, main, view) => {
  const { tensors, layers } = data.layout,
    c = data.checkpoint;
  const states = (i) =>
    Object.entries(i < c.parameters.length ? c.parameters[i].states : { buffer: c.buffers[i - c.parameters.length] });
  const columns = [
    {
      title: "parameter",
      name: true,
      value: (i) => tensors.name[i],
      cell: (i) =>
        page.el(
          "button",
          {
            class: "link",
            type: "button",
            onclick: () => {
              view.choose(i);
              view.canvas.scrollIntoView({ block: "center" });
            },
          },
          tensors.name[i],
        ),
    },
    {
      title: "shape",
      value: (i) => page.shape(tensors.shape[i]),
      cell: (i) => (tensors.count[i] > 1 ? `${page.count(tensors.count[i])} tensors` : page.shape(tensors.shape[i])),
    },
    { title: "elements", right: true, value: (i) => tensors.numel[i], cell: (i) => page.count(tensors.numel[i]) },
    {
      title: "kind",
      value: (i) =>
        [tensors.kind[i], tensors.expert[i] ? "expert" : "", tensors.tied[i] ? "tied" : ""].filter(Boolean).join(", "),
    },
    {
      title: "group",
      right: true,
      value: (i) => tensors.group[i],
      cell: (i) => (tensors.group[i] < 0 ? "" : String(tensors.group[i])),
    },
    { title: "layer", value: (i) => tensors.layer[i], cell: (i) => page.text(layers[tensors.layer[i]], 60) },
    {
      title: "states",
      value: (i) => states(i).length,
      cell: (i) =>
        states(i)
          .map(([k, s]) => (k === page.dtype(s.dtype) ? k : `${k} ${page.dtype(s.dtype)}`))
          .join(", "),
    },
  ];
  const all = tensors.name.map((_, i) => i);
  view.table = page.table("Parameters and buffers", columns, all, { limit: 200, id: "parameters" });
  view.table.all = all;
  main.append(page.section("Parameters", view.table));
};

page.groups = (c, main) => {
  if (!c.groups.length) return;
  const numel = new Map(c.parameters.map((p) => [p.name, p.numel]));
  const keys = [...new Set(c.groups.flatMap((g) => Object.keys(g.hyperparameters)))]
    .filter((k) => c.groups.some((g) => g.hyperparameters[k] !== null))
    .slice(0, 14);
  const shown = (v) =>
    v == null
      ? ""
      : Array.isArray(v)
        ? `(${v.map((x) => page.number(x)).join(", ")})`
        : typeof v === "number"
          ? page.number(v)
          : typeof v === "object"
            ? "…"
            : String(v);
  const columns = [
    { title: "group", value: (i) => i, cell: String },
    {
      title: "parameters",
      right: true,
      value: (i) => c.groups[i].count ?? c.groups[i].parameters.length,
      cell: (i) => page.count(c.groups[i].count ?? c.groups[i].parameters.length),
    },
    {
      title: "elements",
      right: true,
      value: (i) => c.groups[i].parameters.reduce((s, n) => s + (numel.get(n) ?? 0), 0),
      cell: (i) => {
        const n = c.groups[i].parameters.reduce((s, name) => s + (numel.get(name) ?? 0), 0);
        return n ? page.count(n) : "";
      },
    },
    ...keys.map((k) => ({ title: k, right: true, value: (i) => shown(c.groups[i].hyperparameters[k]) })),
    {
      title: "optimizer",
      value: (i) =>
        Object.entries(c.groups[i].scalars)
          .map(([k, s]) => `${k} ${shown(s.value)}`)
          .join(", "),
    },
  ];
  main.append(
    page.section(
      "Parameter groups",
      page.table(
        "Parameter groups of the optimizer",
        columns,
        c.groups.map((_, i) => i),
        { id: "groups" },
      ),
    ),
  );
};

/* A checkpoint that cannot be opened: what verify found, and the files that are there. */
views.damaged = (data, main) => {
  const { findings, files } = data;
  page.head("cannot be opened as a checkpoint", data.location, [
    ["findings", page.count(findings.length)],
    ["files", page.count(files.length)],
    ["size", page.size(files.reduce((sum, f) => sum + f[1], 0))],
  ]);
  main.append(page.findings(findings));
  const columns = [
    { title: "file", name: true, value: (f) => f[0] },
    { title: "size", right: true, value: (f) => f[1], cell: (f) => page.size(f[1]) },
  ];
  main.append(page.section("Files that are there", page.table("Files", columns, files, { id: "files" })));
};
