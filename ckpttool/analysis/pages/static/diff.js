/* The page of a comparison: which layers changed, and by how much. */
views.diff = (data, main) => {
  const { a, b, equal, tensors, notes } = data.diff,
    { layers } = data;
  const different = tensors.filter((t) => t.kind !== "equal");
  page.head(
    equal ? "equal" : `${page.count(different.length)} of ${page.count(tensors.length)} tensors differ`,
    `a: ${a} — b: ${b}`,
    [
      ["tensors", page.count(tensors.length)],
      ["different", page.count(different.length)],
      ["values differ", page.count(tensors.filter((t) => t.kind === "values").length)],
      ["shapes differ", page.count(tensors.filter((t) => t.kind === "shape").length)],
      ["only in a", page.count(tensors.filter((t) => t.kind === "only in a").length)],
      ["only in b", page.count(tensors.filter((t) => t.kind === "only in b").length)],
    ],
  );
  main.append(...notes.map((n) => page.el("p", { class: "note" }, page.text(n, 2000))));
  const numeric = (v) => (v === "inf" ? Infinity : v === "nan" ? NaN : v);
  const numel = (t) => (t.shapes[0] ?? t.shapes[1] ?? []).reduce((p, n) => p * n, 1);
  const measures = {
    max_abs: ["largest difference", (t) => numeric(t.max_abs), Math.max, 0],
    max_rel: ["largest difference relative to b", (t) => numeric(t.max_rel), Math.max, 0],
    share: ["share of the elements that differ", null, null, 0],
  };
  const states = [...new Set(tensors.map((t) => t.state))],
    names = [...new Set(layers)];
  const cells = new Map();
  tensors.forEach((t, i) => {
    const key = JSON.stringify([layers[i], t.state]);
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(t);
  });
  const value = (measure) => (layer, state) => {
    const held = cells.get(JSON.stringify([layer, state]));
    if (!held) return null;
    const odd = held.find((t) => t.kind !== "equal" && t.kind !== "values");
    if (odd) return odd.kind;
    if (measure === "share")
      return (
        held.reduce((s, t) => s + t.differing, 0) /
        Math.max(
          1,
          held.reduce((s, t) => s + numel(t), 0),
        )
      );
    return held.reduce((most, t) => Math.max(most, measures[measure][1](t)), 0);
  };
  const holder = page.el("div"),
    search = page.el("input", {
      type: "search",
      id: "search",
      placeholder: "search: *.mlp.*",
      oninput: () => filter(),
    });
  const draw = (measure) =>
    holder.replaceChildren(
      page.heat(
        `By layer and state: ${measures[measure][0]}. Dark is little, bright is much, on a logarithmic scale.`,
        names.slice(0, 1500),
        states,
        value(measure),
        {
          format: measure === "share" ? (v) => `${page.number(100 * v, 3)} %` : undefined,
          onpick: (layer) => {
            search.value = `${layer}*`;
            filter();
          },
        },
      ),
    );
  main.append(
    page.section(
      "Layers",
      page.el(
        "div",
        { class: "tools" },
        page.el(
          "label",
          {},
          "show",
          page.el(
            "select",
            { id: "measure", onchange: (e) => draw(e.target.value) },
            Object.entries(measures).map(([k, [title]]) => page.el("option", { value: k }, title)),
          ),
        ),
      ),
      holder,
    ),
  );
  draw("max_abs");
  page.redrawAll = () => draw(document.getElementById("measure").value);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", page.redrawAll);
  const shape = (t, i) => (t.shapes[i] ? `${page.dtype(t.dtypes[i])} ${page.shape(t.shapes[i])}` : "-");
  const columns = [
    { title: "tensor", name: true, value: (t) => t.name },
    { title: "state", value: (t) => t.state },
    { title: "differs in", value: (t) => t.kind },
    { title: "a", value: (t) => shape(t, 0) },
    { title: "b", value: (t) => shape(t, 1) },
    {
      title: "elements",
      right: true,
      value: (t) => t.differing,
      cell: (t) => (t.kind === "values" ? page.count(t.differing) : ""),
    },
    {
      title: "max abs",
      right: true,
      value: (t) => numeric(t.max_abs),
      cell: (t) => (t.kind === "values" ? page.number(t.max_abs, 3) : ""),
    },
    {
      title: "max rel",
      right: true,
      value: (t) => numeric(t.max_rel),
      cell: (t) => (t.kind === "values" ? page.number(t.max_rel, 3) : ""),
    },
  ];
  const table = page.table("Tensors; those that differ most come first", columns, tensors, {
    id: "tensors",
    limit: 300,
    sort: [6, true],
  });
  const filter = () => {
    const pattern = page.glob(search.value);
    table.update(pattern ? tensors.filter((t) => pattern.test(t.name)) : tensors);
  };
  main.append(page.section("Tensors", page.el("div", { class: "tools" }, page.el("label", {}, "find", search)), table));
};
