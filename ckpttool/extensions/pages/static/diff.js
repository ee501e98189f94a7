/* The page of a comparison: which layers changed, and by how much. */
views.diff = (data, main) => {
  const { a, b, equal, tensors, notes, kinds, cells } = data.diff,
    of = (kind) => kinds[kind] ?? 0,
    different = data.diff.count - of("equal");
  page.head(
    equal ? "equal" : `${page.count(different)} of ${page.plural(data.diff.count, "tensor")} differ`,
    `a: ${a} — b: ${b}`,
    [
      ["tensors", page.count(data.diff.count)],
      ["different", page.count(different)],
      ["values differ", page.count(of("values"))],
      ["shapes differ", page.count(of("shape"))],
      ["only in a", page.count(of("only in a"))],
      ["only in b", page.count(of("only in b"))],
    ],
  );
  main.append(...notes.map((n) => page.el("p", { class: "note" }, page.text(n, 2000))));
  const numeric = (v) => (v === "inf" ? Infinity : v === "nan" ? NaN : v);
  const measures = {
    max_abs: "largest difference",
    max_rel: "largest difference relative to b",
    share: "share of the elements that differ",
  };
  const states = [...new Set(cells.map((c) => c.state))],
    names = [...new Set(cells.map((c) => c.layer))],
    found = new Map(cells.map((c) => [JSON.stringify([c.layer, c.state]), c]));
  const value = (measure) => (layer, state) => {
    const cell = found.get(JSON.stringify([layer, state]));
    return cell ? (cell.odd ?? numeric(cell[measure])) : null;
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
        `By layer and state: ${measures[measure]}.${equal ? "" : " Dark is little, bright is much, on a logarithmic scale."}${
          data.diff.layers > names.length ? ` The first ${page.count(names.length)} of ${page.count(data.diff.layers)} layers.` : ""
        }`,
        names,
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
            Object.entries(measures).map(([k, title]) => page.el("option", { value: k }, title)),
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
      title: "differing elements",
      right: true,
      value: (t) => t.differing,
      cell: (t) => (t.kind === "values" ? page.count(t.differing) : ""),
    },
    {
      title: "max abs",
      right: true,
      value: (t) => (t.kind === "equal" || t.kind === "values" ? numeric(t.max_abs) : Infinity),
      cell: (t) => (t.kind === "values" ? page.number(t.max_abs, 3) : ""),
    },
    {
      title: "max rel",
      right: true,
      value: (t) => numeric(t.max_rel),
      cell: (t) => (t.kind === "values" ? page.number(t.max_rel, 3) : ""),
    },
  ];
  const left = data.diff.count - tensors.length,
    rest = left ? `; the other ${page.count(left)} differ less, and diff --json prints them` : "";
  const table = page.table(`Tensors${equal ? "" : "; those that differ most come first"}${rest}`, columns, tensors, {
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
