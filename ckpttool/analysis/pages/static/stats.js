/* The page of statistics: norms by layer, the distribution of every tensor, and a series over several steps. */
views.stats = (data, main) => {
  const { layers } = data,
    runs = data.series,
    last = runs.at(-1),
    tensors = last.tensors;
  const odd = tensors.filter((t) => t.nan || t.inf),
    number = (v) => (typeof v === "number" ? v : null);
  const states = [...new Set(tensors.map((t) => t.state))],
    names = [...new Set(layers)];
  page.head(last.tag, `${data.about}. ${last.location}`, [
    ["tensors", page.count(new Set(tensors.map((t) => t.name)).size)],
    ["values", page.short(tensors.reduce((s, t) => s + t.numel, 0))],
    ["states", page.count(states.length), states.join(", ")],
    ["NaN", page.count(tensors.reduce((s, t) => s + t.nan, 0))],
    ["infinite", page.count(tensors.reduce((s, t) => s + t.inf, 0))],
    [
      "zeros",
      `${page.number(
        (100 * tensors.reduce((s, t) => s + t.zeros, 0)) /
          Math.max(
            1,
            tensors.reduce((s, t) => s + t.numel, 0),
          ),
        3,
      )} %`,
    ],
    ["step", last.step == null ? "" : page.count(last.step), runs.length > 1 ? `${runs.length} checkpoints` : ""],
  ]);
  if (odd.length)
    main.append(
      page.el(
        "p",
        { class: "note bad" },
        `${odd.length} tensors have values that are not finite: ${odd
          .slice(0, 5)
          .map((t) => page.text(`${t.name} (${t.state})`, 100))
          .join(", ")}${odd.length > 5 ? ", …" : ""}`,
      ),
    );
  const norm = (held) => Math.sqrt(held.reduce((s, t) => s + t.norm ** 2, 0));
  const norms = (run) =>
    states.map((state, k) => {
      const sums = new Map(names.map((n) => [n, []]));
      run.tensors.forEach((t, i) => {
        if (t.state === state) sums.get(run.layers[i])?.push(t);
      });
      return {
        title: state,
        colour: page.PALETTE[k % 8],
        dash: [[], [6, 3], [2, 3], [8, 3, 2, 3]][k % 4],
        values: names.map((n) => (sums.get(n).length ? norm(sums.get(n)) : null)),
      };
    });
  const section = page.section("Norm by layer");
  main.append(section);
  page.chart(section, {
    title: "Euclidean norm of each layer, by state",
    x: names.map((_, i) => i),
    labels: names,
    log: true,
    series: norms(last),
    xTitle: "layer",
  });
  if (runs.length > 1) {
    const over = page.section("Over the steps"),
      x = runs.map((r, i) => r.step ?? i);
    main.append(over);
    page.chart(over, {
      title: "Norm of the whole model, by state",
      x,
      log: true,
      xTitle: "step",
      series: states.map((state, k) => ({
        title: state,
        colour: page.PALETTE[k % 8],
        values: runs.map((r) => {
          const held = r.tensors.filter((t) => t.state === state);
          return held.length ? norm(held) : null;
        }),
      })),
    });
    const holder = page.el("div"),
      unique = [...new Set(tensors.map((t) => t.name))];
    const one = (name) => {
      holder.replaceChildren();
      page.chart(holder, {
        title: page.text(name, 200),
        x,
        log: true,
        xTitle: "step",
        series: states.map((state, k) => ({
          title: `norm of ${state}`,
          colour: page.PALETTE[k % 8],
          values: runs.map((r) => number(r.tensors.find((t) => t.name === name && t.state === state)?.norm ?? null)),
        })),
      });
    };
    over.append(
      page.el(
        "div",
        { class: "tools" },
        page.el(
          "label",
          {},
          "tensor",
          page.el(
            "select",
            { id: "tensor", onchange: (e) => one(unique[e.target.value]) },
            unique.slice(0, 3000).map((n, i) => page.el("option", { value: i }, page.text(n, 100))),
          ),
        ),
      ),
      holder,
    );
    one(unique[0]);
  }
  const ends = new Map(
    states.map((state) => {
      const held = tensors.filter((t) => t.state === state).flatMap((t) => t.magnitudes.map(([e]) => e));
      return [state, [Math.max(-40, page.smallest(held, 0)), page.largest(held, -1)]];
    }),
  );
  const rms = (t) => t.norm / Math.sqrt(Math.max(1, t.numel - t.nan - t.inf));
  const columns = [
    { title: "tensor", name: true, value: (t) => t.name },
    { title: "state", value: (t) => t.state },
    { title: "type", value: (t) => page.dtype(t.dtype) },
    {
      title: "− large … 0 … + large",
      value: () => 0,
      cell: (t) =>
        page.sketch(t.magnitudes, t.zeros, ...ends.get(t.state), { colour: page.PALETTE[states.indexOf(t.state) % 8] }),
    },
    { title: "elements", right: true, value: (t) => t.numel, cell: (t) => page.count(t.numel) },
    ...["min", "max", "mean", "norm"].map((k) => ({
      title: k,
      right: true,
      value: (t) => number(t[k]) ?? -Infinity,
      cell: (t) => page.number(t[k], 4),
    })),
    { title: "rms", right: true, value: rms, cell: (t) => page.number(rms(t), 4) },
    ...["zeros", "nan", "inf"].map((k) => ({
      title: k === "nan" ? "NaN" : k,
      right: true,
      value: (t) => t[k],
      cell: (t) => (t[k] ? page.count(t[k]) : ""),
    })),
  ];
  const table = page.table(
    "Each tensor. The sketch counts the values by powers of two: negative to the left, positive to the right, zeros in the middle",
    columns,
    tensors,
    { id: "tensors", limit: 150 },
  );
  const search = page.el("input", {
    type: "search",
    id: "search",
    placeholder: "search: *.mlp.*",
    oninput: () => {
      const pattern = page.glob(search.value);
      table.update(pattern ? tensors.filter((t) => pattern.test(t.name)) : tensors);
    },
  });
  main.append(page.section("Tensors", page.el("div", { class: "tools" }, page.el("label", {}, "find", search)), table));
};
