/* The picture of a layout with its tools, keys, search and tables. */
page.LayoutView = class extends page.LayoutPicture {
  constructor(layout, main) {
    super(layout);
    this.detail = page.el("div", { class: "detail", hidden: true });
    this.search = page.el("input", {
      type: "search",
      id: "search",
      placeholder: "search: *.mlp.*",
      autocomplete: "off",
      oninput: () => this.find(this.search.value),
    });
    this.matches = page.el("span", { class: "hint", "aria-live": "polite" });
    this.tools = this.makeTools();
    const keys = page.el(
      "p",
      { class: "hint", id: "layout-keys" },
      "Click a parameter to see every place where it lies, double-click to zoom to it, drag to move when zoomed, " +
        "Ctrl and wheel to zoom. Keys: arrows, Enter, + and −, 0, / to search, Esc.",
    );
    main.append(
      page.section(
        "Layout",
        this.grid(),
        this.tools,
        this.legend,
        page.el("figure", {}, this.canvas),
        keys,
        this.detail,
        this.alternative(),
      ),
    );
    this.listen();
    this.redraw = page.onredraw(() => this.draw(), this.canvas);
    this.draw();
  }

  makeTools() {
    const { layout } = this;
    const choose = (name, options, value, change) =>
      page.el(
        "select",
        { id: name, onchange: (e) => change(e.target.value) },
        options.map(([v, text]) => page.el("option", { value: v, selected: v === value }, text)),
      );
    const colourings = [
      ["layer", "layer"],
      ["group", "parameter group"],
      ["dtype", "type"],
      ["state", "state"],
      ["kind", "trained, frozen, tied, expert"],
    ];
    return page.el(
      "div",
      { class: "tools" },
      page.el(
        "label",
        {},
        "colour",
        choose("colour", colourings, layout.colouring, (v) => {
          layout.colouring = v;
          this.draw();
        }),
      ),
      page.el(
        "label",
        {},
        "position",
        choose(
          "axis",
          [
            ["file", "in the files of each rank"],
            ["model", "in the model"],
          ],
          layout.axis,
          (v) => {
            layout.axis = v;
            layout.zoom = [0, 1];
            this.draw();
          },
        ),
      ),
      page.el("label", {}, "find", this.search),
      this.matches,
      page.el(
        "span",
        {},
        page.el("button", { type: "button", id: "zoom-in", title: "+", onclick: () => this.scale(0.5) }, "zoom in"),
        " ",
        page.el("button", { type: "button", id: "zoom-out", title: "-", onclick: () => this.scale(2) }, "out"),
        " ",
        page.el("button", { type: "button", id: "zoom-all", title: "0", onclick: () => this.reset() }, "all"),
      ),
    );
  }

  /* The grid of tensor- and pipeline-parallel ranks; each cell shows the lanes of one model rank. */
  grid() {
    const { layout } = this,
      t = layout.data.checkpoint.topology,
      { tensor_parallel: tp, pipeline_parallel: pp } = t;
    const ranks = [...new Set(layout.lanes.map((l) => l.model_rank).filter((m) => m != null))];
    if (ranks.length < 2 || ranks.length > 256) return null;
    const buttons = ranks.map((m) => {
      const lanes = layout.lanes.filter((l) => l.model_rank === m),
        files = lanes.flatMap((l) => l.files);
      const nbytes = files.reduce((sum, f) => sum + layout.files[f].nbytes, 0);
      const title =
        [pp > 1 ? `pp ${Math.floor(m / tp)}` : "", tp > 1 ? `tp ${m % tp}` : ""].filter(Boolean).join(" ") ||
        `model rank ${m}`;
      const button = page.el(
        "button",
        {
          type: "button",
          "aria-pressed": "false",
          onclick: () => {
            layout.modelRank = layout.modelRank === m ? null : m;
            buttons.forEach((b) => b.setAttribute("aria-pressed", String(b === button && layout.modelRank === m)));
            this.draw();
          },
        },
        title,
        page.el("small", {}, `${page.size(nbytes)}, ${page.plural(files.length, "file")}`),
      );
      return button;
    });
    const columns = tp > 1 ? Math.min(tp, 8) : Math.min(ranks.length, 8);
    const node = page.el(
      "div",
      {
        class: "grid",
        role: "group",
        "aria-label": "Grid of tensor- and pipeline-parallel ranks: choose one to see its ranks alone",
      },
      buttons,
    );
    node.style.gridTemplateColumns = `repeat(${columns}, auto)`;
    return node;
  }

  listen() {
    const { canvas, layout } = this;
    let from = null;
    canvas.addEventListener("pointermove", (e) => {
      if (from && e.buttons) {
        const [a, b] = from.zoom,
          shift = ((from.x - e.offsetX) / Math.max(1, this.places[0].panel)) * (b - a);
        if (Math.abs(from.x - e.offsetX) + Math.abs(from.y - e.offsetY) > 3) from.moved = true;
        const begin = Math.min(1 - (b - a), Math.max(0, a + shift));
        layout.zoom = [begin, begin + (b - a)];
        if (from.range) this.slide(from.block, from.range[0] + Math.round((from.y - e.offsetY) / from.pitch));
        this.redraw();
        return;
      }
      const hit = this.at(e.offsetX, e.offsetY);
      if (hit) this.tell(hit, e.clientX, e.clientY);
      else page.tip.hide();
    });
    canvas.addEventListener("pointerleave", () => page.tip.hide());
    canvas.addEventListener("pointerdown", (e) => {
      const place = this.places.find((p) => e.offsetY >= p.y && e.offsetY < p.y + p.height);
      from = {
        x: e.offsetX,
        y: e.offsetY,
        zoom: layout.zoom,
        block: place?.block,
        range: place?.block.range,
        pitch: place?.pitch,
        moved: false,
      };
    });
    canvas.addEventListener("pointerup", (e) => {
      if (from && !from.moved) {
        const hit = this.at(e.offsetX, e.offsetY);
        this.choose(hit ? this.tensorOf(hit) : -1);
      }
      from = null;
    });
    canvas.addEventListener("dblclick", (e) => {
      const hit = this.at(e.offsetX, e.offsetY);
      if (hit) this.zoomTo(this.tensorOf(hit));
    });
    canvas.addEventListener(
      "wheel",
      (e) => {
        if (!e.ctrlKey && !e.metaKey) return;
        e.preventDefault();
        const panel = this.places.flatMap((p) => p.panels).find((p) => e.offsetX >= p.x && e.offsetX <= p.x + p.w);
        this.scale(e.deltaY > 0 ? 1.25 : 0.8, panel ? (e.offsetX - panel.x) / panel.w : 0.5);
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (e) => this.key(e));
    canvas.addEventListener("blur", () => {
      page.tip.hide();
      this.redraw();
    });
    document.addEventListener("keydown", (e) => {
      if (e.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
        e.preventDefault();
        this.search.focus();
      }
      if (e.key === "Escape") {
        this.search.value = "";
        this.find("");
        this.choose(-1);
      }
    });
  }

  tensorOf(hit) {
    return this.layout.rows.tensor[this.layout.cell(hit.s, hit.lane).row[hit.k]];
  }

  facts(hit) {
    const cell = this.layout.cell(hit.s, hit.lane),
      d = this.layout.describe(cell.row[hit.k], cell.step[hit.k]);
    const group = this.layout.tensors.group[d.tensor];
    return [
      d,
      [
        ["state", `${d.state}, ${page.dtype(d.dtype)}${d.replica ? ", a replica" : ""}`],
        ["shape", d.shape.length || this.layout.tensors.count[d.tensor] === 1 ? page.shape(d.shape) : ""],
        ["group", group >= 0 ? String(group) : ""],
        ["elements", d.elements],
        ["held by", d.lane],
        ["file", d.file],
        [
          "bytes",
          d.held && !d.woven ? `${page.count(d.offset)} to ${page.count(d.end)}` : `from ${page.count(d.offset)}`,
        ],
        ["padding", d.padding ? `${page.count(d.padding)} elements` : ""],
        ["", this.layout.marks(d.tensor).join(", ")],
        [
          "tied to",
          this.layout
            .tied(d.tensor)
            .map((n) => page.text(n, 80))
            .join(", "),
        ],
      ],
    ];
  }

  tell(hit, x, y) {
    const [d, facts] = this.facts(hit);
    page.tip.show(x, y, d.name, facts);
  }

  key(e) {
    const { layout } = this;
    const moves = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      PageUp: [-9, 0],
      PageDown: [9, 0],
    };
    if (e.key === "+" || e.key === "=") {
      this.scale(0.5);
      return;
    }
    if (e.key === "-") {
      this.scale(2);
      return;
    }
    if (e.key === "0") {
      this.reset();
      return;
    }
    if (e.key === "Enter" && this.focus) {
      e.preventDefault();
      this.choose(this.tensorOf(this.focus));
      return;
    }
    if (!(e.key in moves) || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    this.focus = this.moved(...moves[e.key]);
    const [d, facts] = this.facts(this.focus);
    page.say(
      `${page.text(d.name)}, ${facts
        .filter(([, v]) => v)
        .map(([k, v]) => `${k} ${v}`)
        .join(", ")}`,
    );
    const panel = this.focus.place.panels.find((p) => p.s === this.focus.s),
      [x] = this.across(panel, layout.cell(this.focus.s, this.focus.lane), this.focus.k);
    this.draw();
    const box = this.canvas.getBoundingClientRect(),
      row = this.focus.place.lanes.indexOf(this.focus.lane);
    page.tip.show(
      box.left + Math.max(panel.x, x),
      box.top + this.focus.place.y + (row + 1) * this.focus.place.pitch - 12,
      d.name,
      facts,
    );
  }

  /* The extent to which an arrow leads: behind a lane comes the next panel, under the last lane the next block. */
  moved(down, right) {
    const { layout } = this;
    if (!this.focus || !this.places.includes(this.focus.place)) {
      const place = this.places[0],
        s = place.states[0],
        same =
          this.focus && this.places.find((p) => p.block === this.focus.place.block && p.states.includes(this.focus.s));
      if (!same) return { place, s, lane: place.lanes.find((l) => layout.cell(s, l).n) ?? place.lanes[0], k: 0 };
      this.focus = { ...this.focus, place: same };
    }
    let { place, s, lane, k } = this.focus;
    if (right) {
      k += right;
      const at = place.panels.findIndex((p) => p.s === s),
        next = place.panels[at + right];
      if (k < 0 && next) {
        s = next.s;
        k = layout.cell(s, lane).n - 1;
      }
      if (k >= layout.cell(s, lane).n && next) {
        s = next.s;
        k = 0;
      }
    } else {
      const [x] = this.across(
        place.panels.find((p) => p.s === s),
        layout.cell(s, lane),
        k,
      );
      let row = place.lanes.indexOf(lane) + down;
      const { block } = place,
        hidden = block.range && (down < 0 ? block.range[0] : block.lanes.length - block.range[1]);
      if ((row < 0 || row >= place.lanes.length) && hidden > 0) {
        this.slide(block, block.range[0] + Math.sign(down) * Math.min(Math.abs(down), hidden));
        this.draw();
        place = this.places.find((p) => p.block === block && p.states.includes(s));
        row = Math.min(place.lanes.length - 1, Math.max(0, row));
      }
      if (row < 0 || row >= place.lanes.length) {
        const other = this.places[this.places.indexOf(place) + Math.sign(down)];
        if (other) {
          place = other;
          s = other.states[Math.min(other.states.length - 1, 0)];
          row = down > 0 ? 0 : other.lanes.length - 1;
        } else row = Math.min(place.lanes.length - 1, Math.max(0, row));
      }
      lane = place.lanes[row];
      const cell = layout.cell(s, lane),
        panel = place.panels.find((p) => p.s === s);
      k = 0;
      for (let i = 0; i < cell.n && this.across(panel, cell, i)[0] <= x + 0.5; i++) k = i;
    }
    return { place, s, lane, k: Math.max(0, Math.min(layout.cell(s, lane).n - 1, k)) };
  }

  scale(factor, centre = 0.5) {
    const { layout } = this,
      [a, b] = layout.zoom,
      span = Math.min(1, Math.max(1e-9, (b - a) * factor));
    const begin = Math.min(1 - span, Math.max(0, a + (b - a - span) * centre));
    layout.zoom = [begin, begin + span];
    for (const block of layout.blocks) {
      const whole = block.lanes.length;
      if (whole <= 32) continue;
      const [first, end] = block.range ?? [0, whole],
        n = Math.min(whole, Math.max(12, Math.round((end - first) * factor)));
      block.range = n >= whole ? null : [first, first + n];
      if (block.range) this.slide(block, first);
    }
    this.draw();
  }

  /* Show other ranks of a block that shows some of them. */
  slide(block, first) {
    const n = block.range[1] - block.range[0],
      from = Math.max(0, Math.min(block.lanes.length - n, first));
    block.range = [from, from + n];
  }

  reset() {
    this.layout.zoom = [0, 1];
    this.layout.blocks.forEach((b) => {
      b.range = null;
    });
    this.draw();
  }

  zoomTo(t) {
    const { layout } = this;
    let low = Infinity,
      high = -Infinity;
    for (const place of this.places) {
      for (const panel of place.panels) {
        for (const lane of place.lanes.slice(0, 64)) {
          const cell = layout.cell(panel.s, lane);
          for (let k = 0; k < cell.n; k++) {
            if (layout.rows.tensor[cell.row[k]] !== t) continue;
            const begin = (layout.axis === "model" ? cell.m[k] : cell.x[k]) / panel.total,
              span = (layout.axis === "model" ? cell.span[k] : cell.all[k]) / panel.total;
            low = Math.min(low, begin);
            high = Math.max(high, begin + span);
          }
        }
      }
    }
    if (low > high) return;
    const room = Math.max((high - low) * 0.06, 1e-9);
    layout.zoom = [Math.max(0, low - room), Math.min(1, high + room)];
    this.draw();
  }

  find(text) {
    const { layout } = this,
      pattern = page.glob(text);
    layout.match = pattern ? layout.tensors.name.map((name) => pattern.test(name)) : null;
    const found = layout.match ? layout.match.filter(Boolean).length : 0;
    this.matches.textContent = layout.match ? `${page.count(found)} of ${page.count(layout.tensors.name.length)}` : "";
    if (this.table) this.table.update(layout.match ? this.table.all.filter((t) => layout.match[t]) : this.table.all);
    this.draw();
  }

  choose(t) {
    const { layout } = this;
    layout.chosen = t;
    this.detail.hidden = t < 0;
    if (t >= 0) {
      const { rows, tensors } = layout,
        places = [];
      for (let r = 0; r < rows.file.length; r++)
        if (rows.tensor[r] === t) for (let i = 0; i < rows.count[r]; i++) places.push(layout.describe(r, i));
      const columns = [
        { title: "state", value: (d) => d.state + (d.replica ? " (replica)" : "") },
        { title: "type", value: (d) => page.dtype(d.dtype) },
        { title: "held by", value: (d) => d.lane },
        { title: "elements", value: (d) => d.start, cell: (d) => d.elements },
        { title: "first byte", right: true, value: (d) => d.offset, cell: (d) => page.count(d.offset) },
        {
          title: "bytes",
          right: true,
          value: (d) => d.held,
          cell: (d) => page.count(d.held * layout.data.layout.widths[d.dtype]),
        },
        { title: "padding", right: true, value: (d) => d.padding, cell: (d) => page.count(d.padding) },
        { title: "file", name: true, value: (d) => d.file },
      ];
      const about = [
        tensors.shape[t].length || tensors.count[t] === 1 ? page.shape(tensors.shape[t]) : "",
        page.plural(tensors.numel[t], "element"),
        ...layout.marks(t),
        ...layout.tied(t).map((n) => `tied to ${page.text(n, 80)}`),
      ]
        .filter(Boolean)
        .join(", ");
      this.detail.replaceChildren(
        page.el("h3", { class: "name" }, tensors.name[t]),
        page.el(
          "p",
          { class: "hint" },
          about,
          " ",
          page.el("button", { type: "button", onclick: () => this.zoomTo(t) }, "zoom to it"),
          " ",
          page.el("button", { type: "button", onclick: () => this.choose(-1) }, "close"),
        ),
        page.table(`All places of ${page.text(tensors.name[t], 120)}`, columns, places, { limit: 200, id: "places" }),
      );
      page.say(`${page.text(tensors.name[t])}: ${page.plural(places.length, "place")}`);
    }
    this.draw();
  }

  /* The picture in words and numbers, for those who cannot see it. */
  alternative() {
    const { layout } = this,
      { rows } = layout,
      table = [];
    layout.lanes.forEach((lane, l) =>
      layout.states.forEach((state, s) => {
        const cell = layout.cells[s][l];
        if (!cell.row.length) return;
        const sum = (value) => cell.row.reduce((total, r) => total + value(r), 0);
        table.push({
          lane: lane.label,
          state,
          extents: sum((r) => rows.extents[r]),
          elements: sum((r) => rows.numel[r] * rows.runs[r]),
          padding: sum((r) => rows.padding[r]),
          bytes: cell.bytes,
        });
      }),
    );
    const number = (name) => ({ title: name, right: true, value: (d) => d[name], cell: (d) => page.count(d[name]) });
    const columns = [
      { title: "held by", value: (d) => d.lane },
      { title: "state", value: (d) => d.state },
      number("extents"),
      number("elements"),
      number("padding"),
      number("bytes"),
    ];
    return page.el(
      "details",
      {},
      page.el("summary", {}, "The layout as a table"),
      page.table("What each rank holds of each state", columns, table, { id: "lanes" }),
    );
  }
};
