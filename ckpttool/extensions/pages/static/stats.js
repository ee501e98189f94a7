/* The page of statistics: norms by layer, the distribution of every tensor, and a series over several checkpoints. */
page.Stats = class {
  constructor(data, main) {
    this.main = main;
    this.data = data;
    this.runs = data.series;
    this.last = this.runs.at(-1);
    this.tensors = this.last.tensors;
    this.states = [...new Set(this.runs.flatMap((r) => r.tensors.map((t) => t.state)))];
    this.layers = [...new Set(this.last.layers)];
    this.numels = new Map(this.tensors.map((t) => [JSON.stringify([t.name, t.state]), t.numel]));
    this.counts = new Map(this.tensors.map((t, i) => [t, this.last.counts[i] ?? 1]));
  }

  /* Norms of integers and booleans, such as positions and masks, say nothing. */
  static floating(t) {
    return /^(F|BF|C)\d/.test(t.dtype);
  }

  /* The norm of several tensors: null of none, and undefined if none has a finite value. */
  norm(held) {
    if (!held.length) return null;
    const defined = held.filter((t) => this.defined(t));
    return defined.length ? defined.reduce((sum, t) => Math.hypot(sum, Number(t.norm)), 0) : page.UNDEFINED;
  }

  /* Whether a tensor has a finite value, or no value at all. Only the last checkpoint has the numbers of elements. */
  defined(t) {
    const odd = t.nan + t.inf;
    if (!odd || Number(t.norm) > 0) return true;
    return odd < (t.numel ?? this.numels.get(JSON.stringify([t.name, t.state])) ?? odd);
  }

  /* A number to sort by. */
  static sortable(v) {
    return typeof v === "number" ? v : -Infinity;
  }

  static odd(run) {
    return run.tensors.filter((t) => t.nan || t.inf);
  }

  colour(state) {
    return page.PALETTE[this.states.indexOf(state) % 8];
  }

  series(values) {
    return this.states.map((state, k) => ({
      title: state,
      colour: this.colour(state),
      dash: [[], [6, 3], [2, 3], [8, 3, 2, 3]][k % 4],
      values: values(state),
    }));
  }

  head() {
    const { runs, last, tensors, states } = this,
      sum = (value) => tensors.reduce((s, t) => s + value(t), 0),
      all = (key) => runs.reduce((s, run) => s + run.tensors.reduce((n, t) => n + t[key], 0), 0),
      several = runs.length > 1;
    const inRuns = (key) =>
      several ? `in ${runs.filter((run) => run.tensors.some((t) => t[key])).length} of ${runs.length} checkpoints` : "";
    const of = several ? `of ${last.tag}` : "";
    page.head(
      several ? `${runs.length} checkpoints` : last.tag,
      several ? `${runs.map((r) => r.tag).join(", ")}. ${last.location}` : `${this.data.about}. ${last.location}`,
      [
        ["tensors", page.count(this.data.tensors), of],
        ["values", page.short(sum((t) => t.numel)), of],
        ["states", page.count(states.length), states.join(", ")],
        ["NaN", page.count(all("nan")), inRuns("nan")],
        ["infinite", page.count(all("inf")), inRuns("inf")],
        ["zeros", `${page.number((100 * sum((t) => t.zeros)) / Math.max(1, sum((t) => t.numel)), 3)} %`, of],
        ["step", last.step == null ? "" : page.count(last.step), several && last.step != null ? of : ""],
      ],
    );
  }

  notes() {
    const told = this.runs.flatMap((run) => {
      const odd = page.Stats.odd(run);
      if (!odd.length) return [];
      const names = odd.slice(0, 5).map((t) => page.text(`${t.name} (${t.state})`, 100));
      const what = `${page.plural(odd.length, "tensor has", "tensors have")} values that are NaN or infinite`;
      const where = this.runs.length > 1 ? `${page.text(run.tag, 100)}: ` : "";
      const rest = odd.length > 5 ? `, … (${page.count(odd.length - 5)} more)` : "";
      return [
        page.el(
          "p",
          { class: "note bad" },
          `${where}${what}, which norms, means and extremes leave out: ${names.join(", ")}${rest}`,
        ),
      ];
    });
    if (this.data.folded)
      told.push(
        page.el(
          "p",
          { class: "note" },
          "There are so many tensors that those of similar names and one type are one row. stats --json prints each.",
        ),
      );
    if (told.length > 20) told.splice(20, Infinity, page.el("p", { class: "note bad" }, "More checkpoints have such."));
    return told;
  }

  byLayer() {
    const { layers, last } = this,
      held = new Map();
    last.tensors.forEach((t, i) => {
      if (!page.Stats.floating(t)) return;
      const key = JSON.stringify([last.layers[i], t.state]);
      held.set(key, [...(held.get(key) ?? []), t]);
    });
    const of = (layer, state) => this.norm(held.get(JSON.stringify([layer, state])) ?? []);
    const shown = layers.filter((layer) => this.states.some((state) => of(layer, state) !== null));
    if (!shown.length) return;
    const section = page.section("Norm by layer"),
      whole = this.tensors.filter((t) => !page.Stats.floating(t)).length;
    this.main.append(section); // a chart asks for its width
    page.chart(section, {
      title: `Euclidean norm of each layer, by state${this.runs.length > 1 ? `, of ${page.text(last.tag, 80)}` : ""}`,
      x: shown.map((_, i) => i),
      labels: shown,
      wide: true,
      sparse: true,
      table: "Euclidean norm of each layer, by state",
      series: this.series((state) => shown.map((layer) => of(layer, state))),
      xTitle: "layer",
    });
    if (whole)
      section.append(
        page.el("p", { class: "hint" }, `Norms leave out ${page.plural(whole, "tensor")} of integers or booleans.`),
      );
    const columns = [
      { title: "layer", name: true, value: (i) => i, cell: (i) => shown[i] },
      ...this.states.map((state) => ({
        title: state,
        right: true,
        value: (i) => page.Stats.sortable(of(shown[i], state)),
        cell: (i) => page.number(of(shown[i], state), 5),
      })),
    ];
    section.append(
      page.el(
        "details",
        {},
        page.el("summary", {}, "The norms as a table"),
        page.table("Euclidean norm of each layer, by state", columns, [...shown.keys()], { id: "norms" }),
      ),
    );
  }

  /* How the checkpoints are told apart: by their steps, or, if these are unknown or equal, in the given order. */
  axis() {
    const { runs } = this;
    return this.data.stepped
      ? { x: runs.map((r) => r.step), xTitle: "step" }
      : {
          x: runs.map((_, i) => i),
          xTitle: "checkpoint",
          labels: runs.map((r, i) => `${i + 1}: ${r.location.split("/").filter(Boolean).at(-1) ?? r.tag}`),
        };
  }

  overSteps() {
    const { runs, data } = this,
      over = page.section(data.stepped ? "Over the steps" : "Over the checkpoints");
    this.main.append(over);
    if (!data.stepped)
      over.append(
        page.el("p", { class: "hint" }, "The checkpoints have no steps of their own: they are in the given order."),
      );
    const whole = (run, state) =>
      this.norm(run.tensors.filter((t) => t.state === state && page.Stats.floating(t)));
    page.chart(over, {
      title: "Norm of the whole model, by state",
      ...this.axis(),
      wide: true,
      table: "The checkpoints in numbers",
      series: this.series((state) => runs.map((run) => whole(run, state))),
    });
    const count = (run, key) => run.tensors.reduce((n, t) => n + t[key], 0);
    const columns = [
      { title: "checkpoint", name: true, value: (i) => i, cell: (i) => runs[i].tag },
      { title: "location", name: true, value: (i) => runs[i].location },
      {
        title: "step",
        right: true,
        value: (i) => runs[i].step ?? -1,
        cell: (i) => (runs[i].step == null ? "" : page.count(runs[i].step)),
      },
      ...this.states.map((state) => ({
        title: `norm of ${state}`,
        right: true,
        value: (i) => page.Stats.sortable(whole(runs[i], state)),
        cell: (i) => page.number(whole(runs[i], state), 5),
      })),
      ...[
        ["nan", "NaN"],
        ["inf", "infinite"],
      ].map(([key, title]) => ({
        title,
        right: true,
        value: (i) => count(runs[i], key),
        cell: (i) => page.count(count(runs[i], key)),
      })),
    ];
    over.append(page.table("The checkpoints in numbers", columns, [...runs.keys()], { id: "checkpoints" }));
    this.oneTensor(over);
  }

  oneTensor(over) {
    const { runs } = this,
      holder = page.el("div"),
      names = [...new Set(runs.flatMap((r) => r.tensors.map((t) => t.name)))];
    const one = (name) => {
      const held = runs.map((r) => new Map(r.tensors.filter((t) => t.name === name).map((t) => [t.state, t])));
      const states = this.states.filter((state) => held.some((tensors) => tensors.has(state)));
      holder.replaceChildren();
      page.chart(holder, {
        title: page.text(name, 200),
        ...this.axis(),
        wide: true,
        series: states.map((state) => ({
          title: `norm of ${state}`,
          colour: this.colour(state),
          values: held.map((tensors) => this.norm([tensors.get(state)].filter(Boolean))),
        })),
      });
    };
    const options = names.map((n, i) => page.el("option", { value: i }, page.text(n, 100)));
    over.append(
      page.el(
        "div",
        { class: "tools" },
        page.el(
          "label",
          {},
          "tensor",
          page.el("select", { id: "tensor", onchange: (e) => one(names[e.target.value]) }, options),
        ),
      ),
      holder,
    );
    one(names[0]);
  }

  /* The range of exponents that the sketches of one scale share; null if it would be wider than 60 powers of two. */
  ranges(scale) {
    const held = new Map();
    for (const t of this.tensors) {
      const of = held.get(scale(t)) ?? new Map();
      for (const [e, negative, positive] of t.magnitudes) of.set(e, (of.get(e) ?? 0) + negative + positive);
      held.set(scale(t), of);
    }
    return new Map(
      [...held].map(([key, counts]) => {
        const [low, high] = page.bulk(counts);
        return [key, high - low > page.WIDEST ? null : [low, high]];
      }),
    );
  }

  /* The range of the sketch of one tensor; it has at most 61 powers of two, and 8 at least: bars are no wider. */
  static ownRange(magnitudes) {
    const [low, high] = page.bulk(new Map(magnitudes.map(([e, negative, positive]) => [e, negative + positive])));
    return [Math.max(Math.min(low, high - 7), high - page.WIDEST), high];
  }

  table() {
    const { tensors } = this,
      scale = (t) => `${t.state}${page.Stats.floating(t) ? "" : " (integers)"}`;
    const ranges = this.ranges(scale);
    const rangeOf = (t) => ranges.get(scale(t)) ?? page.Stats.ownRange(t.magnitudes),
      shared = [...ranges].filter(([, range]) => range).map(([key, [low, high]]) => `${key} from 2^${low} to 2^${high + 1}`),
      own = [...ranges].filter(([, range]) => !range).map(([key]) => key);
    const norm = (t) => (this.defined(t) ? t.norm : page.UNDEFINED),
      rms = (t) => (this.defined(t) ? t.norm / Math.sqrt(Math.max(1, t.numel - t.nan - t.inf)) : page.UNDEFINED);
    const columns = [
      { title: "tensor", name: true, value: (t) => t.name },
      ...(this.data.folded
        ? [{ title: "tensors", right: true, value: (t) => this.counts.get(t), cell: (t) => page.count(this.counts.get(t)) }]
        : []),
      { title: "state", value: (t) => t.state },
      { title: "type", value: (t) => page.dtype(t.dtype) },
      {
        title: "− large … 0 … + large",
        value: () => 0,
        cell: (t) => {
          const [low, high] = rangeOf(t);
          return [
            page.sketch(t.magnitudes, t.zeros, low, high, { colour: this.colour(t.state) }),
            page.el(
              "small",
              { class: "scale", "aria-hidden": "true" },
              [`−2^${high + 1}`, `±2^${low}`, `2^${high + 1}`].map((text) => page.el("span", {}, text)),
            ),
          ];
        },
      },
      { title: "elements", right: true, value: (t) => t.numel, cell: (t) => page.count(t.numel) },
      ...[
        ...["min", "max", "mean"].map((k) => [k, (t) => (this.defined(t) ? t[k] : page.UNDEFINED)]),
        ["norm", norm],
        ["rms", rms],
      ].map(([title, of]) => ({
        title,
        right: true,
        value: (t) => page.Stats.sortable(of(t)),
        cell: (t) => page.number(of(t), 4),
      })),
      ...["zeros", "nan", "inf"].map((k) => ({
        title: k === "nan" ? "NaN" : k,
        right: true,
        value: (t) => t[k],
        cell: (t) => (t[k] ? page.count(t[k]) : ""),
      })),
    ];
    const of = this.runs.length > 1 ? ` of ${page.text(this.last.tag, 80)}` : "";
    const about =
      "The sketch counts the values by powers of two: negative to the left, positive to the right, zeros in the middle; " +
      "its fullest bar is full." +
      (shared.length ? ` The tensors of one state share a scale: ${shared.join("; ")}.` : "") +
      (own.length ? ` Each tensor of ${own.join(", ")} has a scale of its own: together they need too wide a one.` : "") +
      (tensors.some((t) => page.beyond(t.magnitudes, ...rangeOf(t)))
        ? " A triangle marks a bar that also counts values beyond the scale."
        : "") +
      (this.data.rounded ? " Counts in the sketches have two digits." : "");
    const table = page.table(`Each tensor${of}`, columns, tensors, { id: "tensors", limit: 150 });
    const search = page.el("input", {
      type: "search",
      id: "search",
      placeholder: "search: *.mlp.*",
      oninput: () => {
        const pattern = page.glob(search.value);
        table.update(pattern ? tensors.filter((t) => pattern.test(t.name)) : tensors);
      },
    });
    this.main.append(
      page.section(
        "Tensors",
        page.el("p", { class: "hint" }, document.createTextNode(page.text(about, 2000))),
        page.el("div", { class: "tools" }, page.el("label", {}, "find", search)),
        table,
      ),
    );
  }
};

views.stats = (data, main) => {
  const stats = new page.Stats(data, main);
  stats.head();
  main.append(...stats.notes());
  stats.byLayer();
  if (data.series.length > 1) stats.overSteps();
  stats.table();
};
