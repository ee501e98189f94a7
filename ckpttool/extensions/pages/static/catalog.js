/* The page of a root: the checkpoints of a run over time and step. */
views.catalog = (data, main) => {
  const { entries, problems, root } = data.catalog,
    decisions = new Map(data.decisions.map((d) => [d.entry.name, d]));
  const total = entries.reduce((sum, e) => sum + e.nbytes, 0),
    whole = entries.filter((e) => e.whole),
    latest = entries.find((e) => e.latest);
  const gone = data.decisions.filter((d) => !d.keep),
    thinned = data.decisions.filter((d) => d.thin);
  const freed =
    `frees ${page.size(gone.reduce((sum, d) => sum + d.entry.nbytes, 0))}` +
    (thinned.length ? `, thins ${page.count(thinned.length)}` : "");
  page.head(root.split("/").filter(Boolean).at(-1) ?? root, root, [
    ["checkpoints", page.count(entries.length), `${page.count(whole.length)} whole`],
    ["size", page.size(total)],
    ["latest", latest ? latest.name : "none", latest?.step == null ? "" : `step ${page.count(latest.step)}`],
    ["last saved", entries.some((e) => e.saved) ? date(page.largest(entries.map((e) => e.saved ?? 0))) : ""],
    ["retention", data.rules ? freed : "", data.rules],
  ]);
  main.append(...problems.map((p) => page.el("p", { class: "note bad" }, page.text(p, 2000))));
  function date(seconds) {
    return new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ");
  }
  const pinned = (e) => (e.pin ? `, pinned${e.pin.who ? ` by ${e.pin.who}` : ""}: ${e.pin.why}` : "");
  const stateOf = new Map(entries.map((e, i) => [e, data.states[i]]));
  const isBroken = (e) => ["torn", "not whole"].includes(stateOf.get(e));
  const state = (e) =>
    page.text(
      stateOf.get(e) + (e.latest ? ", latest" : "") + pinned(e) + (e.link ? `, link to ${e.link}` : ""),
      600,
    );
  const kind = (e) => (e.stage != null ? `ZeRO-${e.stage}` : e.thin != null ? `thin ${e.thin}` : (e.format ?? ""));
  /* A torn checkpoint may not tell its step: then its name does. */
  const stepOf = new Map(entries.map((e, i) => [e, e.step ?? data.steps[i]]));
  const stepped = entries
    .filter((e) => stepOf.get(e) != null && !e.link)
    .sort((a, b) => stepOf.get(a) - stepOf.get(b));
  if (stepped.length) {
    const x = stepped.map((e) => stepOf.get(e)),
      section = page.section("Over the steps");
    main.append(section);
    const named = stepped.filter((e) => e.step == null).length;
    if (named)
      section.append(
        page.el("p", { class: "hint" }, `The step of ${page.plural(named, "checkpoint")} is that of the name.`),
      );
    if (new Set(x).size === 1 && x.length > 1)
      section.append(
        page.el("p", { class: "hint" }, `All ${page.count(x.length)} checkpoints are of step ${page.count(x[0])}.`),
      );
    const names = [...new Set(stepped.flatMap((e) => Object.keys(e.metrics)))].filter((n) =>
      stepped.some((e) => e.metrics[n] != null),
    );
    const first = names.find((n) => /loss/.test(n)) ?? names[0],
      holder = page.el("div");
    const metric = (name) => {
      holder.replaceChildren();
      page.chart(holder, {
        title: name,
        x,
        xTitle: "step",
        series: [{ title: name, colour: page.PALETTE[0], values: stepped.map((e) => e.metrics[name] ?? null) }],
      });
    };
    if (first !== undefined) {
      if (names.length > 1)
        section.append(
          page.el(
            "div",
            { class: "tools" },
            page.el(
              "label",
              {},
              "metric",
              page.el(
                "select",
                { id: "metric", onchange: (e) => metric(names[e.target.value]) },
                names
                  .slice(0, 300)
                  .map((n, i) => page.el("option", { value: i, selected: n === first }, page.text(n, 80))),
              ),
            ),
            names.length > 300 ? page.el("span", { class: "hint" }, `the first 300 of ${page.count(names.length)}`) : null,
          ),
        );
      section.append(holder);
      metric(first);
    }
    const pair = [page.el("div"), page.el("div")];
    section.append(page.el("div", { class: "pair" }, pair));
    page.chart(pair[0], {
      title: "Size of the checkpoints",
      fromZero: true,
      sparse: true,
      table: "Checkpoints, by step",
      x,
      xTitle: "step",
      height: 180,
      unit: page.size,
      series: [
        { title: "whole", colour: page.PALETTE[2], values: stepped.map((e) => (e.whole ? e.nbytes : null)) },
        ...(stepped.some(isBroken)
          ? [
              {
                title: "torn, or not whole",
                colour: page.PALETTE[5],
                loose: true,
                values: stepped.map((e) => (isBroken(e) ? e.nbytes : null)),
              },
            ]
          : []),
      ],
    });
    const dated = stepped.filter((e) => e.saved).sort((a, b) => a.saved - b.saved);
    if (dated.length > 1)
      page.chart(pair[1], {
        title: "Steps over time",
        fromZero: true,
        table: "Checkpoints, by step",
        x: dated.map((e) => e.saved),
        time: true,
        xTitle: "saved at (UTC)",
        height: 180,
        unit: (v) => page.count(v),
        series: [{ title: "step", colour: page.PALETTE[0], values: dated.map((e) => stepOf.get(e)) }],
      });
  }
  const most = page.largest(
    entries.map((e) => e.nbytes),
    1,
  );
  const bar = (e) => {
    const i = page.el("i", { class: "bar", "aria-hidden": "true" });
    i.style.width = `${(e.nbytes / most) * 110}px`;
    i.style.background = e.whole ? page.PALETTE[2] : page.PALETTE[5];
    return i;
  };
  const columns = [
    { title: "checkpoint", name: true, value: (e) => e.name },
    { title: "step", right: true, value: (e) => e.step ?? -1, cell: (e) => (e.step == null ? "" : page.count(e.step)) },
    { title: "format", value: kind },
    { title: "ranks", right: true, value: (e) => e.world_size ?? 0, cell: (e) => e.world_size ?? "" },
    { title: "", value: () => "", cell: bar },
    { title: "size", right: true, value: (e) => e.nbytes, cell: (e) => page.size(e.nbytes) },
    { title: "saved (UTC)", value: (e) => e.saved ?? 0, cell: (e) => (e.saved ? date(e.saved) : "") },
    {
      title: "state",
      value: state,
      cell: (e) =>
        page.el(
          "span",
          { class: "words" },
          state(e),
          e.problem ? page.el("span", { class: "hint" }, ` ${page.text(e.problem, 400)}`) : null,
        ),
    },
    ...(data.rules
      ? [
          {
            title: `with ${data.rules}`,
            value: (e) => String(decisions.get(e.name)?.keep),
            cell: (e) => {
              const d = decisions.get(e.name);
              return d
                ? page.el(
                    "span",
                    { class: "words" },
                    page.el("b", {}, !d.keep ? "removed" : d.thin ? `thinned to ${d.thin}` : "kept"),
                    `: ${page.text(d.reason, 400)}`,
                  )
                : "";
            },
          },
        ]
      : []),
  ];
  main.append(
    page.section("Checkpoints", page.table("Checkpoints, by step", columns, entries, { id: "entries" })),
  );
};
