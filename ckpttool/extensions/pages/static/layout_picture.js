/* The picture of a layout on a canvas: a lane for each rank, a panel for each state, a block for each extent. */
page.LayoutPicture = class {
  constructor(layout) {
    this.layout = layout;
    this.focus = null;
    this.canvas = page.el("canvas", {
      tabindex: "0",
      role: "application",
      "aria-label":
        "Layout of the checkpoint. Arrow keys move from extent to extent and from rank to rank, Enter selects the parameter.",
      "aria-describedby": "layout-keys",
    });
    this.legend = page.el("div", { class: "legend" });
  }

  shownLanes(block) {
    const { layout } = this;
    const lanes =
      layout.modelRank == null
        ? block.lanes
        : block.lanes.filter(
            (l) => layout.lanes[l].model_rank === layout.modelRank || layout.lanes[l].model_rank == null,
          );
    return block.range ? lanes.slice(block.range[0], block.range[1]) : lanes;
  }

  /* Where each block, panel and lane goes. */
  arrange(width) {
    const { layout } = this;
    const narrow = width < 560;
    const longest = page.largest(layout.lanes.map((l) => l.label.length));
    const gutter = Math.min(Math.max(56, longest * 6.6 + 14), narrow ? 84 : 190);
    let y = 0;
    this.places = [];
    for (const block of layout.blocks) {
      const lanes = this.shownLanes(block);
      if (!lanes.length) continue;
      const n = lanes.length,
        whole = block.lanes.length;
      const full = whole <= 12 ? 30 : whole <= 32 ? 20 : whole <= 80 ? 8 : 0;
      const body = full ? Math.min(whole * full, Math.max(n * 30, 30)) : 520;
      const pitch = full && !block.range ? full : Math.min(30, body / n);
      const perRow = narrow ? 1 : Math.min(block.states.length, Math.max(1, Math.floor((width - gutter) / 150)));
      for (let first = 0; first < block.states.length; first += perRow) {
        const states = block.states.slice(first, first + perRow);
        const panel = (width - gutter - 14 * (states.length - 1)) / states.length;
        const place = {
          block,
          lanes,
          states,
          y: y + 40,
          pitch,
          height: pitch * n,
          gutter,
          panel,
          panels: states.map((s, k) => ({ s, x: gutter + k * (panel + 14), w: panel })),
        };
        for (const p of place.panels)
          p.total =
            layout.axis === "model"
              ? layout.elements
              : page.largest(
                  block.lanes.map((l) => layout.cells[p.s][l].bytes),
                  1,
                );
        this.places.push(place);
        y += 40 + place.height + 34;
      }
    }
    return y;
  }

  draw() {
    const { layout } = this,
      started = performance.now();
    const width = this.canvas.clientWidth || 600;
    const height = this.arrange(width);
    const [g] = page.canvas(this.canvas, height);
    const colours = layout.colours();
    this.paint = layout.rows.file.map((_, r) => colours.of(r));
    const hatch = page.css("--hatch");
    this.theme = { empty: page.css("--empty"), page: page.css("--page"), text: page.css("--text") };
    this.patterns = {
      padding: page.hatch(g, "slash", hatch),
      frozen: page.hatch(g, "bars", page.dark() ? "rgba(0,0,0,.5)" : "rgba(255,255,255,.6)"),
      expert: page.hatch(g, "dots", "rgba(255,255,255,.75)"),
      replica: page.hatch(g, "back", page.dark() ? "rgba(0,0,0,.55)" : "rgba(255,255,255,.65)"),
    };
    layout.drawn = 0;
    for (const place of this.places) this.drawPlace(g, place);
    for (const place of this.places) this.drawChosen(g, place);
    this.drawLegend(colours);
    this.milliseconds = performance.now() - started;
  }

  drawPlace(g, place) {
    const { layout } = this,
      soft = page.css("--soft"),
      text = page.css("--text"),
      empty = page.css("--empty");
    const bytesOf = (s) => layout.lanes.reduce((sum, _, l) => sum + layout.cells[s][l].bytes, 0);
    for (const panel of place.panels) {
      g.textBaseline = "alphabetic";
      g.font = "600 13px system-ui, sans-serif";
      g.fillStyle = text;
      const label = page.text(layout.states[panel.s], 40);
      g.fillText(label, panel.x, place.y - 9);
      const after = g.measureText(label).width + 8,
        nbytes = page.size(bytesOf(panel.s));
      g.font = "12.5px system-ui, sans-serif";
      g.fillStyle = soft;
      const role = { fp32: "master weights", module: "the model's copy", buffer: "buffers" }[layout.states[panel.s]];
      const about = [role && `${role}, ${nbytes}`, nbytes].find(
        (text) => text && g.measureText(text).width <= panel.w - after,
      );
      if (about) g.fillText(about, panel.x + after, place.y - 9);
      this.ticks(g, place, panel, soft);
    }
    const step = Math.max(1, Math.ceil(13 / place.pitch));
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    const gap = place.pitch >= 12 ? 4 : place.pitch >= 5 ? 1 : 0;
    const count = place.lanes.length,
      pixels = place.pitch < 1 ? Math.round(place.height) : count;
    for (let k = 0; k < pixels; k++) {
      const first = place.pitch < 1 ? Math.floor((k * count) / pixels) : k;
      const end = place.pitch < 1 ? Math.floor(((k + 1) * count) / pixels) : k + 1;
      const top = place.pitch < 1 ? place.y + k : place.y + k * place.pitch,
        high = place.pitch < 1 ? 1 : place.pitch - gap;
      const lane = place.lanes[first];
      for (const panel of place.panels) {
        g.fillStyle = empty;
        if (layout.axis === "model" || place.pitch >= 5) g.fillRect(panel.x, top, panel.w, high);
        this.drawLane(g, place, panel, lane, top, high);
        for (let other = first + 1; other < end; other++)
          layout.drawn += layout.cells[panel.s][place.lanes[other]].row.reduce(
            (sum, r) => sum + layout.rows.extents[r],
            0,
          );
      }
      if (k % Math.max(step, place.pitch < 1 ? Math.ceil(pixels / 24) : 1) === 0) {
        g.fillStyle = soft;
        let label = page.text(layout.lanes[lane].label, 60);
        while (label.length > 4 && g.measureText(label).width > place.gutter - 10) label = label.slice(0, -2) + "…";
        g.fillText(label, 0, top + Math.max(high / 2, 6));
      }
    }
  }

  /* Positions under a panel: bytes of the lane, or elements of the model. */
  ticks(g, place, panel, colour) {
    const { layout } = this,
      [a, b] = layout.zoom,
      from = a * panel.total,
      span = (b - a) * panel.total;
    const wanted = Math.max(2, Math.floor(panel.w / 100)),
      raw = span / wanted,
      power = 10 ** Math.floor(Math.log10(raw || 1));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw) || raw;
    const y = place.y + place.height + 4;
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "top";
    g.fillStyle = g.strokeStyle = colour;
    g.lineWidth = 1;
    let free = panel.x; // where the next label may begin
    for (let at = Math.ceil(from / step) * step; at <= from + span * 1.0001; at += step) {
      const x = panel.x + ((at - from) / span) * panel.w;
      g.fillRect(Math.min(x, panel.x + panel.w - 1), y - 4, 1, 4);
      const text = layout.axis === "model" ? page.short(at, step) : page.size(at, step),
        wide = g.measureText(text).width;
      const left = Math.max(panel.x, Math.min(x - wide / 2, panel.x + panel.w - wide));
      if (left >= free) g.fillText(text, left, y + 3);
      free = left + wide + 6;
    }
  }

  /* The extents of a lane. Those that a search found come last and have two pixels at least: no neighbour covers them. */
  drawLane(g, place, panel, lane, top, high) {
    const { layout } = this,
      { match } = layout,
      { row, n } = layout.cell(panel.s, lane),
      found = [];
    g.save();
    g.beginPath();
    g.rect(panel.x, top, panel.w, high);
    g.clip();
    for (let k = 0; k < n; k++) {
      if (match?.[layout.rows.tensor[row[k]]]) found.push(k);
      else this.drawExtent(g, panel, lane, k, top, high);
    }
    for (const k of found) this.drawExtent(g, panel, lane, k, top, high);
    g.restore();
  }

  drawExtent(g, panel, lane, k, top, high) {
    const { layout, theme } = this,
      { rows, match } = layout,
      cell = layout.cell(panel.s, lane),
      r = cell.row[k],
      t = rows.tensor[r];
    const [a, b] = layout.zoom,
      from = a * panel.total,
      scale = panel.w / ((b - a) * panel.total),
      model = layout.axis === "model";
    // Edges between pixels would let the background shine through between neighbours.
    const ratio = devicePixelRatio || 1,
      snap = (v) => Math.round(v * ratio) / ratio;
    const x = panel.x + ((model ? cell.m[k] : cell.x[k]) - from) * scale;
    const wide = (model ? cell.span[k] : cell.held[k]) * scale,
      all = model ? wide : cell.all[k] * scale;
    if (x + all < panel.x || x > panel.x + panel.w) return;
    layout.drawn += rows.extents[r];
    const hit = match && match[t],
      least = hit && wide > 0 ? 2 : 0;
    const last = Math.floor((panel.x + panel.w) * ratio) / ratio - least,
      left = least ? Math.max(Math.ceil(panel.x * ratio) / ratio, Math.min(snap(x), last)) : snap(x),
      right = Math.max(snap(x + wide), left + least),
      end = Math.max(snap(x + all), right);
    if (end === left) return; // its pixel belongs to the next one
    g.globalAlpha = match && !hit ? 0.13 : 1;
    const w = right - left;
    if (w > 0) {
      g.fillStyle = this.paint[r];
      g.fillRect(left, top, w, high);
      if (w > 4 && high > 5) this.drawMarks(g, t, r, left, top, w, high);
    }
    if (end > right) {
      for (const style of [theme.empty, this.patterns.padding]) {
        g.fillStyle = style;
        g.fillRect(right, top, end - right, high);
      }
    }
    if (all > (high > 10 ? 3 : 14)) {
      g.fillStyle = theme.page;
      g.fillRect(end - 1, top, 1, high);
    }
    if (wide > 34 && high >= 14)
      this.drawName(g, t, r, Math.max(x, panel.x), top, Math.min(x + wide, panel.x + panel.w), high);
  }

  drawMarks(g, t, r, x, top, w, high) {
    const { tensors, rows } = this.layout;
    for (const [set, name] of [
      [tensors.kind[t] === "frozen", "frozen"],
      [tensors.expert[t], "expert"],
      [rows.replica[r], "replica"],
    ]) {
      if (!set) continue;
      g.fillStyle = this.patterns[name];
      g.fillRect(x, top, w, high);
    }
    if (tensors.tied[t]) {
      g.fillStyle = this.theme.text;
      g.fillRect(x, top + high - 3, w, 3);
    }
  }

  drawName(g, t, r, left, top, right, high) {
    const name = page.text(this.layout.tensors.name[t], 90),
      parts = name.split("."),
      room = right - left - 8;
    g.font = "11px system-ui, sans-serif";
    let label = "";
    const plain = ["weight", "bias"].includes(parts.at(-1)) && parts.length > 1 ? parts.at(-2) : parts.at(-1);
    for (const tried of [...parts.keys()]
      .map((n) => parts.slice(n).join("."))
      .filter((s) => s !== "weight" && s !== "bias")
      .concat(plain)) {
      if (!label && tried && g.measureText(tried).width <= room) label = tried;
    }
    if (!label) return;
    const { tensors, rows } = this.layout;
    if (tensors.kind[t] === "frozen" || tensors.expert[t] || rows.replica[r]) {
      g.fillStyle = this.paint[r];
      g.fillRect(left + 2, top + 2, g.measureText(label).width + 5, high - 4 - (tensors.tied[t] ? 3 : 0));
    }
    g.fillStyle = page.ink(this.paint[r]);
    g.textBaseline = "middle";
    g.fillText(label, left + 4, top + high / 2 + 0.5 - (tensors.tied[t] ? 1 : 0));
  }

  /* Outlines of the chosen parameter, and of the extent under the keyboard. */
  drawChosen(g, place) {
    const { layout } = this,
      mark = page.css("--mark"),
      gap = place.pitch >= 12 ? 4 : place.pitch >= 5 ? 1 : 0;
    if (layout.chosen >= 0) {
      const step = place.pitch < 1 ? Math.ceil(1 / place.pitch) : 1;
      for (let k = 0; k < place.lanes.length; k += step) {
        for (const panel of place.panels) {
          const cell = layout.cell(panel.s, place.lanes[k]);
          for (let i = 0; i < cell.n; i++)
            if (layout.rows.tensor[cell.row[i]] === layout.chosen)
              this.outline(g, place, panel, k, cell, i, mark, gap, place.pitch < 6);
        }
      }
    }
    if (this.focus && document.activeElement === this.canvas && this.focus.place.block === place.block) {
      const panel = place.panels.find((p) => p.s === this.focus.s),
        k = place.lanes.indexOf(this.focus.lane);
      if (panel && k >= 0)
        this.outline(
          g,
          place,
          panel,
          k,
          layout.cell(panel.s, this.focus.lane),
          this.focus.k,
          page.css("--text"),
          gap,
          false,
        );
    }
  }

  outline(g, place, panel, k, cell, i, colour, gap, filled) {
    const [x, w] = this.across(panel, cell, i);
    const left = Math.max(x, panel.x),
      right = Math.min(x + w, panel.x + panel.w);
    if (right < left) return;
    if (filled) {
      g.fillStyle = colour;
      g.fillRect(left, place.y + k * place.pitch, Math.max(right - left, 2), Math.max(place.pitch - gap, 1));
      return;
    }
    g.strokeStyle = colour;
    g.lineWidth = place.pitch < 14 ? 1.2 : 2.5;
    g.strokeRect(left, place.y + k * place.pitch, Math.max(right - left, 3), place.pitch - gap);
  }

  across(panel, cell, i) {
    const { layout } = this,
      [a, b] = layout.zoom,
      scale = panel.w / ((b - a) * panel.total),
      model = layout.axis === "model";
    return [
      panel.x + ((model ? cell.m[i] : cell.x[i]) - a * panel.total) * scale,
      (model ? cell.span[i] : cell.all[i]) * scale,
    ];
  }

  drawLegend(colours) {
    const { layout } = this,
      { tensors, rows } = layout,
      swatch = (colour) => {
        const i = page.el("i");
        i.style.background = colour;
        return i;
      };
    const items = [];
    if (colours.ramp) {
      const ramp = page.el("i", { class: "ramp" });
      ramp.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((t) => page.ramp(t, page.dark() ? 0.14 : 0.03, 0.95)).join(", ")})`;
      items.push(page.el("span", {}, page.text(colours.ramp[0], 40), ramp, page.text(colours.ramp.at(-1), 40)));
    } else items.push(...colours.legend.map(([c, name]) => page.el("span", {}, swatch(c), page.text(name, 40))));
    const pattern = (name, base) => {
      const c = page.el("canvas", { width: 18, height: 12 }),
        g = c.getContext("2d");
      g.fillStyle = base;
      g.fillRect(0, 0, 18, 12);
      g.fillStyle = this.patterns[name];
      g.fillRect(0, 0, 18, 12);
      return c;
    };
    const base = "#4f6d8f";
    if (rows.padding.some((p) => p > 0) && layout.axis === "file")
      items.push(page.el("span", {}, pattern("padding", page.css("--empty")), "padding"));
    if (tensors.kind.includes("frozen") && layout.colouring !== "kind")
      items.push(page.el("span", {}, pattern("frozen", base), "frozen"));
    if (tensors.expert.some(Boolean) && layout.colouring !== "kind")
      items.push(page.el("span", {}, pattern("expert", base), "expert"));
    if (rows.replica.some(Boolean)) items.push(page.el("span", {}, pattern("replica", base), "replica"));
    if (tensors.tied.some(Boolean) && layout.colouring !== "kind") {
      const tied = page.el("i");
      tied.style.background = base;
      tied.style.borderBottom = "3px solid var(--text)";
      items.push(page.el("span", {}, tied, "tied"));
    }
    this.legend.replaceChildren(...items);
  }

  /* The extent at a point of the canvas. */
  at(x, y) {
    const { layout } = this;
    for (const place of this.places) {
      if (y < place.y || y >= place.y + place.height) continue;
      const panel = place.panels.find((p) => x >= p.x && x <= p.x + p.w);
      if (!panel) continue;
      const lane = place.lanes[Math.min(place.lanes.length - 1, Math.floor((y - place.y) / place.pitch))],
        cell = layout.cell(panel.s, lane);
      let best = -1,
        width = Infinity;
      for (let k = 0; k < cell.n; k++) {
        const [left, w] = this.across(panel, cell, k);
        if (x >= left - 0.5 && x <= left + Math.max(w, 1) + 0.5 && w < width) {
          best = k;
          width = w;
        }
      }
      return best < 0 ? null : { place, s: panel.s, lane, k: best };
    }
    return null;
  }
};
