/* The picture of a layout: a lane for each rank, a panel for each state, a block of colour for each extent. */
page.Layout = class {
  constructor(data) {
    this.data = data;
    const { layout } = data;
    this.rows = layout.rows;
    this.tensors = layout.tensors;
    this.states = layout.states;
    this.lanes = layout.lanes;
    this.files = data.layout.files;
    this.axis = "file";
    this.colouring = layout.layers.length > 1 ? "layer" : "state";
    this.zoom = [0, 1];
    this.match = null;
    this.chosen = -1;
    this.modelRank = null;
    this.drawn = 0;
    this.cache = new Map();
    this.placeLanes();
    this.placeTensors();
  }

  /* Which rows lie in which lane, for each state. */
  placeLanes() {
    const { rows, lanes } = this;
    const laneOf = new Map(lanes.flatMap((lane, at) => lane.files.map((file) => [file, at])));
    this.order = new Map(lanes.flatMap((lane) => lane.files.map((file, at) => [file, at])));
    this.cells = this.states.map(() => lanes.map(() => ({ row: [], step: [], bytes: 0 })));
    for (let r = 0; r < rows.file.length; r++) {
      const nbytes = this.nbytes(r);
      for (let i = 0; i < rows.count[r]; i++) {
        const cell = this.cells[rows.state[r]][laneOf.get(rows.file[r] + i * rows.file_step[r])];
        cell.row.push(r);
        cell.step.push(i);
        cell.bytes += nbytes;
      }
    }
    const groups = new Map();
    this.states.forEach((_, s) => {
      const held = lanes.map((_, l) => l).filter((l) => this.cells[s][l].row.length);
      const key = held.join();
      if (held.length) groups.set(key, { lanes: held, states: [...(groups.get(key)?.states ?? []), s], range: null });
    });
    this.blocks = [...groups.values()];
  }

  nbytes(r) { return (this.rows.numel[r] * this.rows.runs[r] + this.rows.padding[r]) * this.rows.width[r]; }

  /* Where each tensor begins when all are put one behind the other, in the order of the module. */
  placeTensors() {
    let at = 0;
    this.begin = this.tensors.numel.map((n) => { const begin = at; at += n; return begin; });
    this.elements = at;
  }

  /* The extents of one state in one lane, in the order of its files. */
  cell(s, l) {
    const key = s * this.lanes.length + l;
    let found = this.cache.get(key);
    if (found) return found;
    const { rows } = this, cell = this.cells[s][l], n = cell.row.length;
    const place = (k) => [this.order.get(rows.file[cell.row[k]] + cell.step[k] * rows.file_step[cell.row[k]]), rows.offset[cell.row[k]] + cell.step[k] * rows.offset_step[cell.row[k]]];
    const places = Array.from({ length: n }, (_, k) => place(k));
    const order = Array.from({ length: n }, (_, k) => k).sort((a, b) => places[a][0] - places[b][0] || places[a][1] - places[b][1]);
    found = { n, row: new Int32Array(n), step: new Int32Array(n), x: new Float64Array(n), held: new Float64Array(n), all: new Float64Array(n), m: new Float64Array(n), span: new Float64Array(n) };
    let x = 0;
    order.forEach((k, at) => {
      const r = cell.row[k], i = cell.step[k];
      found.row[at] = r;
      found.step[at] = i;
      found.x[at] = x;
      found.held[at] = rows.numel[r] * rows.runs[r] * rows.width[r];
      found.all[at] = this.nbytes(r);
      x += found.all[at];
      const folded = rows.extents[r] > 1;
      found.m[at] = this.begin[rows.tensor[r]] + (folded ? 0 : rows.start[r] + i * rows.start_step[r]);
      found.span[at] = folded ? this.tensors.numel[rows.tensor[r]] : rows.runs[r] > 1 ? (rows.runs[r] - 1) * rows.pitch[r] + rows.numel[r] : rows.numel[r];
    });
    if (this.cache.size > 6000) this.cache.clear();
    this.cache.set(key, found);
    return found;
  }

  /* One extent as facts for people. */
  describe(r, i) {
    const { rows, tensors } = this, t = rows.tensor[r], file = rows.file[r] + i * rows.file_step[r];
    const offset = rows.offset[r] + i * rows.offset_step[r], start = rows.start[r] + i * rows.start_step[r];
    const held = rows.numel[r] * rows.runs[r];
    const lane = this.lanes.find((each) => each.files.includes(file));
    return {
      tensor: t, name: tensors.name[t], state: this.states[rows.state[r]], dtype: this.data.layout.dtypes[rows.dtype[r]], shape: tensors.shape[t], lane: lane.label,
      elements: rows.extents[r] > 1 ? `${page.count(held)} of ${page.count(tensors.numel[t])}, in ${page.count(rows.extents[r])} extents`
        : !held ? "none, only padding" : rows.runs[r] > 1 ? `${page.count(rows.runs[r])} runs of ${page.count(rows.numel[r])}, from ${page.count(start)}, every ${page.count(rows.pitch[r])}`
          : `${page.count(start)} to ${page.count(start + held)} of ${page.count(tensors.numel[t])}`,
      start, held, file: this.files[file]?.name ?? `file ${file}`, offset, end: offset + held * rows.width[r], padding: rows.padding[r], replica: !!rows.replica[r], woven: rows.runs[r] > 1,
    };
  }

  marks(t) {
    const { kind, expert, tied, count } = this.tensors;
    return [kind[t] !== "trained" ? kind[t] : "", expert[t] ? "expert" : "", tied[t] ? "tied" : "", count[t] > 1 ? `stands for ${page.count(count[t])} tensors` : ""].filter(Boolean);
  }

  tied(t) {
    return Object.entries(this.data.checkpoint.aliases).filter(([, stored]) => stored === this.tensors.name[t]).map(([alias]) => alias);
  }

  colours() {
    const { tensors, data } = this, { layers, dtypes } = data.layout, P = page.PALETTE;
    const grey = page.dark() ? "#8b93a1" : "#8a919e";
    const byLayer = (t) => { const at = tensors.layer[t], c = page.ramp(layers.length > 1 ? at / (layers.length - 1) : 0.3, page.dark() ? 0.14 : 0.03, 0.95); return c; };
    const kindOf = (t) => (tensors.kind[t] !== "trained" ? tensors.kind[t] : tensors.expert[t] ? "expert" : tensors.tied[t] ? "tied" : "trained");
    const kinds = { trained: P[0], expert: P[1], tied: P[2], frozen: P[4], buffer: P[3] };
    const groups = [...new Set(tensors.group)].sort((a, b) => a - b);
    const groupName = (g) => (g === -2 ? "no group (frozen, buffers)" : g === -1 ? "group unknown" : `group ${g}`);
    const groupColour = (g) => (g < 0 ? grey : P[g % 8]);
    const modes = {
      layer: { of: (r) => byLayer(this.rows.tensor[r]), ramp: layers },
      group: { of: (r) => groupColour(tensors.group[this.rows.tensor[r]]), legend: groups.map((g) => [groupColour(g), groupName(g)]) },
      dtype: { of: (r) => P[this.rows.dtype[r] % 8], legend: dtypes.map((d, i) => [P[i % 8], page.dtype(d)]) },
      state: { of: (r) => P[this.rows.state[r] % 8], legend: this.states.map((s, i) => [P[i % 8], s]) },
      kind: { of: (r) => kinds[kindOf(this.rows.tensor[r])], legend: Object.entries(kinds).filter(([k]) => tensors.kind.some((_, t) => kindOf(t) === k)).map(([k, c]) => [c, k]) },
    };
    return modes[this.colouring];
  }
};

page.LayoutView = class {
  constructor(layout, main) {
    this.layout = layout;
    this.focus = null;
    this.hover = null;
    this.canvas = page.el("canvas", { tabindex: "0", role: "application", "aria-label": "Layout of the checkpoint. Arrow keys move from extent to extent and from rank to rank, Enter selects the parameter.", "aria-describedby": "layout-keys" });
    this.legend = page.el("div", { class: "legend" });
    this.detail = page.el("div", { class: "detail", hidden: true });
    this.search = page.el("input", { type: "search", id: "search", placeholder: "search: *.mlp.*", autocomplete: "off", oninput: () => this.find(this.search.value) });
    this.matches = page.el("span", { class: "hint", "aria-live": "polite" });
    const choose = (name, options, value, change) => page.el("select", { id: name, onchange: (e) => change(e.target.value) }, options.map(([v, text]) => page.el("option", { value: v, selected: v === value }, text)));
    const colourings = [["layer", "layer"], ["group", "parameter group"], ["dtype", "type"], ["state", "state"], ["kind", "trained, frozen, tied, expert"]];
    this.tools = page.el("div", { class: "tools" },
      page.el("label", {}, "colour", choose("colour", colourings, layout.colouring, (v) => { layout.colouring = v; this.draw(); })),
      page.el("label", {}, "position", choose("axis", [["file", "in the files of each rank"], ["model", "in the model"]], layout.axis, (v) => { layout.axis = v; layout.zoom = [0, 1]; this.draw(); })),
      page.el("label", {}, "find", this.search), this.matches,
      page.el("span", {}, page.el("button", { type: "button", id: "zoom-in", title: "+", onclick: () => this.scale(0.5) }, "zoom in"), " ",
        page.el("button", { type: "button", id: "zoom-out", title: "-", onclick: () => this.scale(2) }, "out"), " ",
        page.el("button", { type: "button", id: "zoom-all", title: "0", onclick: () => this.reset() }, "all")));
    const keys = page.el("p", { class: "hint", id: "layout-keys" }, "Click a parameter to see every place where it lies, double-click to zoom to it, drag to move when zoomed, Ctrl and wheel to zoom. Keys: arrows, Enter, + and −, 0, / to search, Esc.");
    main.append(page.section("Layout", this.grid(), this.tools, this.legend, page.el("figure", {}, this.canvas), keys, this.detail, this.alternative()));
    this.listen();
    this.redraw = page.onredraw(() => this.draw(), this.canvas);
    this.draw();
  }

  /* The grid of tensor- and pipeline-parallel ranks; each cell shows the lanes of one model rank. */
  grid() {
    const { layout } = this, t = layout.data.checkpoint.topology, { tensor_parallel: tp, pipeline_parallel: pp } = t;
    const ranks = [...new Set(layout.lanes.map((l) => l.model_rank).filter((m) => m != null))];
    if (ranks.length < 2 || ranks.length > 256) return null;
    const buttons = ranks.map((m) => {
      const lanes = layout.lanes.filter((l) => l.model_rank === m), files = lanes.flatMap((l) => l.files);
      const nbytes = files.reduce((sum, f) => sum + layout.files[f].nbytes, 0);
      const title = [pp > 1 ? `pp ${Math.floor(m / tp)}` : "", tp > 1 ? `tp ${m % tp}` : ""].filter(Boolean).join(" ") || `model rank ${m}`;
      const button = page.el("button", { type: "button", "aria-pressed": "false", onclick: () => {
        layout.modelRank = layout.modelRank === m ? null : m;
        buttons.forEach((b) => b.setAttribute("aria-pressed", String(b === button && layout.modelRank === m)));
        this.draw();
      } }, title, page.el("small", {}, `${page.size(nbytes)}, ${files.length} files`));
      return button;
    });
    const columns = tp > 1 ? Math.min(tp, 8) : Math.min(ranks.length, 8);
    const node = page.el("div", { class: "grid", role: "group", "aria-label": "Grid of tensor- and pipeline-parallel ranks: choose one to see its ranks alone" }, buttons);
    node.style.gridTemplateColumns = `repeat(${columns}, auto)`;
    return node;
  }

  shownLanes(block) {
    const { layout } = this;
    const lanes = layout.modelRank == null ? block.lanes : block.lanes.filter((l) => layout.lanes[l].model_rank === layout.modelRank || layout.lanes[l].model_rank == null);
    return block.range ? lanes.slice(block.range[0], block.range[1]) : lanes;
  }

  /* Where each block, panel and lane goes. */
  arrange(width) {
    const { layout } = this;
    const narrow = width < 560;
    const longest = Math.max(...layout.lanes.map((l) => l.label.length));
    const gutter = Math.min(Math.max(56, longest * 6.6 + 14), narrow ? 84 : 190);
    let y = 0;
    this.places = [];
    for (const block of layout.blocks) {
      const lanes = this.shownLanes(block);
      if (!lanes.length) continue;
      const n = lanes.length, whole = block.lanes.length;
      const full = whole <= 12 ? 30 : whole <= 32 ? 20 : whole <= 80 ? 8 : 0;
      const body = full ? Math.min(whole * full, Math.max(n * 30, 30)) : 520;
      const pitch = full && !block.range ? full : Math.min(30, body / n);
      const perRow = narrow ? 1 : Math.min(block.states.length, Math.max(1, Math.floor((width - gutter) / 150)));
      for (let first = 0; first < block.states.length; first += perRow) {
        const states = block.states.slice(first, first + perRow);
        const panel = (width - gutter - 14 * (states.length - 1)) / states.length;
        const place = { block, lanes, states, y: y + 40, pitch, height: pitch * n, gutter, panel, panels: states.map((s, k) => ({ s, x: gutter + k * (panel + 14), w: panel })) };
        for (const p of place.panels) p.total = layout.axis === "model" ? layout.elements : Math.max(1, ...block.lanes.map((l) => layout.cells[p.s][l].bytes));
        this.places.push(place);
        y += 40 + place.height + 34;
      }
    }
    return y;
  }

  draw() {
    const { layout } = this, started = performance.now();
    const width = this.canvas.clientWidth || 600;
    const height = this.arrange(width);
    const [g] = page.canvas(this.canvas, height);
    const colours = layout.colours();
    this.paint = layout.rows.file.map((_, r) => colours.of(r));
    const hatch = page.css("--hatch");
    this.theme = { empty: page.css("--empty"), page: page.css("--page"), text: page.css("--text") };
    this.patterns = { padding: page.hatch(g, "slash", hatch), frozen: page.hatch(g, "bars", page.dark() ? "rgba(0,0,0,.5)" : "rgba(255,255,255,.6)"), expert: page.hatch(g, "dots", "rgba(255,255,255,.75)"), replica: page.hatch(g, "back", page.dark() ? "rgba(0,0,0,.55)" : "rgba(255,255,255,.65)") };
    layout.drawn = 0;
    for (const place of this.places) this.drawPlace(g, place);
    for (const place of this.places) this.drawChosen(g, place);
    this.drawLegend(colours);
    this.milliseconds = performance.now() - started;
  }

  drawPlace(g, place) {
    const { layout } = this, soft = page.css("--soft"), text = page.css("--text"), empty = page.css("--empty");
    const bytesOf = (s) => layout.lanes.reduce((sum, _, l) => sum + layout.cells[s][l].bytes, 0);
    for (const panel of place.panels) {
      g.textBaseline = "alphabetic";
      g.font = "600 13px system-ui, sans-serif";
      g.fillStyle = text;
      const label = page.text(layout.states[panel.s], 40);
      g.fillText(label, panel.x, place.y - 9);
      const after = g.measureText(label).width + 8, nbytes = page.size(bytesOf(panel.s));
      g.font = "12.5px system-ui, sans-serif";
      g.fillStyle = soft;
      const role = { fp32: "master weights", module: "the model's copy", buffer: "buffers" }[layout.states[panel.s]];
      const about = [role && `${role}, ${nbytes}`, nbytes].find((text) => text && g.measureText(text).width <= panel.w - after);
      if (about) g.fillText(about, panel.x + after, place.y - 9);
      this.ticks(g, place, panel, soft);
    }
    const step = Math.max(1, Math.ceil(13 / place.pitch));
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    const gap = place.pitch >= 12 ? 4 : place.pitch >= 5 ? 1 : 0;
    const count = place.lanes.length, pixels = place.pitch < 1 ? Math.round(place.height) : count;
    for (let k = 0; k < pixels; k++) {
      const first = place.pitch < 1 ? Math.floor((k * count) / pixels) : k;
      const end = place.pitch < 1 ? Math.floor(((k + 1) * count) / pixels) : k + 1;
      const top = place.pitch < 1 ? place.y + k : place.y + k * place.pitch, high = place.pitch < 1 ? 1 : place.pitch - gap;
      const lane = place.lanes[first];
      for (const panel of place.panels) {
        g.fillStyle = empty;
        if (layout.axis === "model" || place.pitch >= 5) g.fillRect(panel.x, top, panel.w, high);
        this.drawLane(g, place, panel, lane, top, high);
        for (let other = first + 1; other < end; other++) layout.drawn += layout.cells[panel.s][place.lanes[other]].row.reduce((sum, r) => sum + layout.rows.extents[r], 0);
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
    const { layout } = this, [a, b] = layout.zoom, from = a * panel.total, span = (b - a) * panel.total;
    const wanted = Math.max(2, Math.floor(panel.w / 100)), raw = span / wanted, power = 10 ** Math.floor(Math.log10(raw || 1));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw) || raw;
    const y = place.y + place.height + 4;
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "top";
    g.fillStyle = g.strokeStyle = colour;
    g.lineWidth = 1;
    for (let at = Math.ceil(from / step) * step; at <= from + span * 1.0001; at += step) {
      const x = panel.x + ((at - from) / span) * panel.w;
      g.fillRect(Math.min(x, panel.x + panel.w - 1), y - 4, 1, 4);
      const text = layout.axis === "model" ? page.short(at, step) : page.size(at, step), wide = g.measureText(text).width;
      if (x + wide / 2 <= panel.x + panel.w + 6) g.fillText(text, Math.max(panel.x, x - wide / 2), y + 3);
    }
  }

  drawLane(g, place, panel, lane, top, high) {
    const { layout } = this, { rows } = layout, cell = layout.cell(panel.s, lane);
    const [a, b] = layout.zoom, from = a * panel.total, scale = panel.w / ((b - a) * panel.total), model = layout.axis === "model";
    const { theme } = this, match = layout.match;
    // Edges between pixels would let the background shine through between neighbours.
    const ratio = devicePixelRatio || 1, snap = (v) => Math.round(v * ratio) / ratio;
    g.save();
    g.beginPath();
    g.rect(panel.x, top, panel.w, high);
    g.clip();
    for (let k = 0; k < cell.n; k++) {
      const r = cell.row[k], t = rows.tensor[r];
      const x = panel.x + ((model ? cell.m[k] : cell.x[k]) - from) * scale;
      const wide = (model ? cell.span[k] : cell.held[k]) * scale, all = model ? wide : cell.all[k] * scale;
      layout.drawn += rows.extents[r];
      if (x + all < panel.x || x > panel.x + panel.w) { layout.drawn -= rows.extents[r]; continue; }
      const hit = match && match[t], left = snap(x), right = snap(x + wide), end = snap(x + all);
      if (end === left && !hit) continue; // its pixel belongs to the next one
      g.globalAlpha = match && !hit ? 0.13 : 1;
      const w = Math.max(right - left, hit ? 2 : 0);
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
      if (wide > 34 && high >= 14) this.drawName(g, t, r, Math.max(x, panel.x), top, Math.min(x + wide, panel.x + panel.w), high);
    }
    g.restore();
  }

  drawMarks(g, t, r, x, top, w, high) {
    const { tensors, rows } = this.layout;
    for (const [set, name] of [[tensors.kind[t] === "frozen", "frozen"], [tensors.expert[t], "expert"], [rows.replica[r], "replica"]]) {
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
    const name = page.text(this.layout.tensors.name[t], 90), parts = name.split("."), room = right - left - 8;
    g.font = "11px system-ui, sans-serif";
    let label = "";
    const plain = ["weight", "bias"].includes(parts.at(-1)) && parts.length > 1 ? parts.at(-2) : parts.at(-1);
    for (const tried of [...parts.keys()].map((n) => parts.slice(n).join(".")).filter((s) => s !== "weight" && s !== "bias").concat(plain)) {
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
    const { layout } = this, mark = page.css("--mark"), gap = place.pitch >= 12 ? 4 : place.pitch >= 5 ? 1 : 0;
    if (layout.chosen >= 0) {
      const step = place.pitch < 1 ? Math.ceil(1 / place.pitch) : 1;
      for (let k = 0; k < place.lanes.length; k += step) {
        for (const panel of place.panels) {
          const cell = layout.cell(panel.s, place.lanes[k]);
          for (let i = 0; i < cell.n; i++) if (layout.rows.tensor[cell.row[i]] === layout.chosen) this.outline(g, place, panel, k, cell, i, mark, gap, place.pitch < 6);
        }
      }
    }
    if (this.focus && document.activeElement === this.canvas && this.focus.place.block === place.block) {
      const panel = place.panels.find((p) => p.s === this.focus.s), k = place.lanes.indexOf(this.focus.lane);
      if (panel && k >= 0) this.outline(g, place, panel, k, layout.cell(panel.s, this.focus.lane), this.focus.k, page.css("--text"), gap, false);
    }
  }

  outline(g, place, panel, k, cell, i, colour, gap, filled) {
    const [x, w] = this.across(panel, cell, i);
    const left = Math.max(x, panel.x), right = Math.min(x + w, panel.x + panel.w);
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
    const { layout } = this, [a, b] = layout.zoom, scale = panel.w / ((b - a) * panel.total), model = layout.axis === "model";
    return [panel.x + ((model ? cell.m[i] : cell.x[i]) - a * panel.total) * scale, (model ? cell.span[i] : cell.all[i]) * scale];
  }

  drawLegend(colours) {
    const { layout } = this, { tensors, rows } = layout, swatch = (colour) => { const i = page.el("i"); i.style.background = colour; return i; };
    const items = [];
    if (colours.ramp) {
      const ramp = page.el("i", { class: "ramp" });
      ramp.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((t) => page.ramp(t, page.dark() ? 0.14 : 0.03, 0.95)).join(", ")})`;
      items.push(page.el("span", {}, page.text(colours.ramp[0], 40), ramp, page.text(colours.ramp.at(-1), 40)));
    } else items.push(...colours.legend.map(([c, name]) => page.el("span", {}, swatch(c), page.text(name, 40))));
    const pattern = (name, base) => {
      const c = page.el("canvas", { width: 18, height: 12 }), g = c.getContext("2d");
      g.fillStyle = base;
      g.fillRect(0, 0, 18, 12);
      g.fillStyle = this.patterns[name];
      g.fillRect(0, 0, 18, 12);
      return c;
    };
    const base = "#4f6d8f";
    if (rows.padding.some((p) => p > 0) && layout.axis === "file") items.push(page.el("span", {}, pattern("padding", page.css("--empty")), "padding"));
    if (tensors.kind.includes("frozen") && layout.colouring !== "kind") items.push(page.el("span", {}, pattern("frozen", base), "frozen"));
    if (tensors.expert.some(Boolean) && layout.colouring !== "kind") items.push(page.el("span", {}, pattern("expert", base), "expert"));
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
      const lane = place.lanes[Math.min(place.lanes.length - 1, Math.floor((y - place.y) / place.pitch))], cell = layout.cell(panel.s, lane);
      let best = -1, width = Infinity;
      for (let k = 0; k < cell.n; k++) {
        const [left, w] = this.across(panel, cell, k);
        if (x >= left - 0.5 && x <= left + Math.max(w, 1) + 0.5 && w < width) { best = k; width = w; }
      }
      return best < 0 ? null : { place, s: panel.s, lane, k: best };
    }
    return null;
  }

  listen() {
    const { canvas, layout } = this;
    let from = null;
    canvas.addEventListener("pointermove", (e) => {
      if (from && e.buttons) {
        const [a, b] = from.zoom, shift = ((from.x - e.offsetX) / Math.max(1, this.places[0].panel)) * (b - a);
        if (Math.abs(from.x - e.offsetX) + Math.abs(from.y - e.offsetY) > 3) from.moved = true;
        const begin = Math.min(1 - (b - a), Math.max(0, a + shift));
        layout.zoom = [begin, begin + (b - a)];
        if (from.range) this.slide(from.block, from.range[0] + Math.round((from.y - e.offsetY) / from.pitch));
        this.redraw();
        return;
      }
      const hit = this.at(e.offsetX, e.offsetY);
      this.hover = hit;
      if (hit) this.tell(hit, e.clientX, e.clientY); else page.tip.hide();
    });
    canvas.addEventListener("pointerleave", () => page.tip.hide());
    canvas.addEventListener("pointerdown", (e) => {
      const place = this.places.find((p) => e.offsetY >= p.y && e.offsetY < p.y + p.height);
      from = { x: e.offsetX, y: e.offsetY, zoom: layout.zoom, block: place?.block, range: place?.block.range, pitch: place?.pitch, moved: false };
    });
    canvas.addEventListener("pointerup", (e) => {
      if (from && !from.moved) { const hit = this.at(e.offsetX, e.offsetY); this.choose(hit ? this.tensorOf(hit) : -1); }
      from = null;
    });
    canvas.addEventListener("dblclick", (e) => { const hit = this.at(e.offsetX, e.offsetY); if (hit) this.zoomTo(this.tensorOf(hit)); });
    canvas.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey) return;
      e.preventDefault();
      const panel = this.places.flatMap((p) => p.panels).find((p) => e.offsetX >= p.x && e.offsetX <= p.x + p.w);
      this.scale(e.deltaY > 0 ? 1.25 : 0.8, panel ? (e.offsetX - panel.x) / panel.w : 0.5);
    }, { passive: false });
    canvas.addEventListener("keydown", (e) => this.key(e));
    canvas.addEventListener("blur", () => { page.tip.hide(); this.redraw(); });
    document.addEventListener("keydown", (e) => {
      if (e.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) { e.preventDefault(); this.search.focus(); }
      if (e.key === "Escape") { this.search.value = ""; this.find(""); this.choose(-1); }
    });
  }

  tensorOf(hit) { return this.layout.rows.tensor[this.layout.cell(hit.s, hit.lane).row[hit.k]]; }

  facts(hit) {
    const cell = this.layout.cell(hit.s, hit.lane), d = this.layout.describe(cell.row[hit.k], cell.step[hit.k]);
    const group = this.layout.tensors.group[d.tensor];
    return [d, [["state", `${d.state}, ${page.dtype(d.dtype)}${d.replica ? ", a replica" : ""}`], ["shape", d.shape.length || this.layout.tensors.count[d.tensor] === 1 ? page.shape(d.shape) : ""], ["group", group >= 0 ? String(group) : ""],
      ["elements", d.elements], ["held by", d.lane], ["file", d.file], ["bytes", d.held && !d.woven ? `${page.count(d.offset)} to ${page.count(d.end)}` : `from ${page.count(d.offset)}`],
      ["padding", d.padding ? `${page.count(d.padding)} elements` : ""], ["", this.layout.marks(d.tensor).join(", ")], ["tied to", this.layout.tied(d.tensor).map((n) => page.text(n, 80)).join(", ")]]];
  }

  tell(hit, x, y) { const [d, facts] = this.facts(hit); page.tip.show(x, y, d.name, facts); }

  key(e) {
    const { layout } = this;
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-9, 0], PageDown: [9, 0] };
    if (e.key === "+" || e.key === "=") { this.scale(0.5); return; }
    if (e.key === "-") { this.scale(2); return; }
    if (e.key === "0") { this.reset(); return; }
    if (e.key === "Enter" && this.focus) { e.preventDefault(); this.choose(this.tensorOf(this.focus)); return; }
    if (!(e.key in moves) || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    this.focus = this.moved(...moves[e.key]);
    const [d, facts] = this.facts(this.focus);
    page.say(`${page.text(d.name)}, ${facts.filter(([, v]) => v).map(([k, v]) => `${k} ${v}`).join(", ")}`);
    const panel = this.focus.place.panels.find((p) => p.s === this.focus.s), [x] = this.across(panel, layout.cell(this.focus.s, this.focus.lane), this.focus.k);
    this.draw();
    const box = this.canvas.getBoundingClientRect(), row = this.focus.place.lanes.indexOf(this.focus.lane);
    page.tip.show(box.left + Math.max(panel.x, x), box.top + this.focus.place.y + (row + 1) * this.focus.place.pitch - 12, d.name, facts);
  }

  /* The extent to which an arrow leads; at the end of a lane comes the next panel, under the last lane the next block. */
  moved(down, right) {
    const { layout } = this;
    if (!this.focus || !this.places.includes(this.focus.place)) {
      const place = this.places[0], s = place.states[0], same = this.focus && this.places.find((p) => p.block === this.focus.place.block && p.states.includes(this.focus.s));
      if (!same) return { place, s, lane: place.lanes.find((l) => layout.cell(s, l).n) ?? place.lanes[0], k: 0 };
      this.focus = { ...this.focus, place: same };
    }
    let { place, s, lane, k } = this.focus;
    if (right) {
      k += right;
      const at = place.panels.findIndex((p) => p.s === s), next = place.panels[at + right];
      if (k < 0 && next) { s = next.s; k = layout.cell(s, lane).n - 1; }
      if (k >= layout.cell(s, lane).n && next) { s = next.s; k = 0; }
    } else {
      const [x] = this.across(place.panels.find((p) => p.s === s), layout.cell(s, lane), k);
      let row = place.lanes.indexOf(lane) + down;
      const { block } = place, hidden = block.range && (down < 0 ? block.range[0] : block.lanes.length - block.range[1]);
      if ((row < 0 || row >= place.lanes.length) && hidden > 0) {
        this.slide(block, block.range[0] + Math.sign(down) * Math.min(Math.abs(down), hidden));
        this.draw();
        place = this.places.find((p) => p.block === block && p.states.includes(s));
        row = Math.min(place.lanes.length - 1, Math.max(0, row));
      }
      if (row < 0 || row >= place.lanes.length) {
        const other = this.places[this.places.indexOf(place) + Math.sign(down)];
        if (other) { place = other; s = other.states[Math.min(other.states.length - 1, 0)]; row = down > 0 ? 0 : other.lanes.length - 1; } else row = Math.min(place.lanes.length - 1, Math.max(0, row));
      }
      lane = place.lanes[row];
      const cell = layout.cell(s, lane), panel = place.panels.find((p) => p.s === s);
      k = 0;
      for (let i = 0; i < cell.n && this.across(panel, cell, i)[0] <= x + 0.5; i++) k = i;
    }
    return { place, s, lane, k: Math.max(0, Math.min(layout.cell(s, lane).n - 1, k)) };
  }

  scale(factor, centre = 0.5) {
    const { layout } = this, [a, b] = layout.zoom, span = Math.min(1, Math.max(1e-9, (b - a) * factor));
    const begin = Math.min(1 - span, Math.max(0, a + (b - a - span) * centre));
    layout.zoom = [begin, begin + span];
    for (const block of layout.blocks) {
      const whole = block.lanes.length;
      if (whole <= 32) continue;
      const [first, end] = block.range ?? [0, whole], n = Math.min(whole, Math.max(12, Math.round((end - first) * factor)));
      block.range = n >= whole ? null : [first, first + n];
      if (block.range) this.slide(block, first);
    }
    this.draw();
  }

  /* Show other ranks of a block that shows some of them. */
  slide(block, first) {
    const n = block.range[1] - block.range[0], from = Math.max(0, Math.min(block.lanes.length - n, first));
    block.range = [from, from + n];
  }

  reset() { this.layout.zoom = [0, 1]; this.layout.blocks.forEach((b) => { b.range = null; }); this.draw(); }

  zoomTo(t) {
    const { layout } = this;
    let low = Infinity, high = -Infinity;
    for (const place of this.places) {
      for (const panel of place.panels) {
        for (const lane of place.lanes.slice(0, 64)) {
          const cell = layout.cell(panel.s, lane);
          for (let k = 0; k < cell.n; k++) {
            if (layout.rows.tensor[cell.row[k]] !== t) continue;
            const begin = (layout.axis === "model" ? cell.m[k] : cell.x[k]) / panel.total, span = (layout.axis === "model" ? cell.span[k] : cell.all[k]) / panel.total;
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
    const { layout } = this, pattern = page.glob(text);
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
      const { rows, tensors } = layout, places = [];
      for (let r = 0; r < rows.file.length; r++) if (rows.tensor[r] === t) for (let i = 0; i < rows.count[r]; i++) places.push(layout.describe(r, i));
      const columns = [
        { title: "state", value: (d) => d.state + (d.replica ? " (replica)" : "") }, { title: "type", value: (d) => page.dtype(d.dtype) }, { title: "held by", value: (d) => d.lane },
        { title: "elements", value: (d) => d.start, cell: (d) => d.elements }, { title: "first byte", right: true, value: (d) => d.offset, cell: (d) => page.count(d.offset) },
        { title: "bytes", right: true, value: (d) => d.held, cell: (d) => page.count(d.held * layout.data.layout.widths[d.dtype]) }, { title: "padding", right: true, value: (d) => d.padding, cell: (d) => page.count(d.padding) },
        { title: "file", name: true, value: (d) => d.file }];
      const about = [tensors.shape[t].length || tensors.count[t] === 1 ? page.shape(tensors.shape[t]) : "", `${page.count(tensors.numel[t])} elements`, ...layout.marks(t), ...layout.tied(t).map((n) => `tied to ${page.text(n, 80)}`)].filter(Boolean).join(", ");
      this.detail.replaceChildren(page.el("h3", { class: "name" }, tensors.name[t]), page.el("p", { class: "hint" }, about, " ",
        page.el("button", { type: "button", onclick: () => this.zoomTo(t) }, "zoom to it"), " ", page.el("button", { type: "button", onclick: () => this.choose(-1) }, "close")),
        page.table(`All places of ${page.text(tensors.name[t], 120)}`, columns, places, { limit: 200, id: "places" }));
      page.say(`${page.text(tensors.name[t])}: ${places.length} places`);
    }
    this.draw();
  }

  /* The picture in words and numbers, for those who cannot see it. */
  alternative() {
    const { layout } = this, { rows } = layout, table = [];
    layout.lanes.forEach((lane, l) => layout.states.forEach((state, s) => {
      const cell = layout.cells[s][l];
      if (!cell.row.length) return;
      const sum = (value) => cell.row.reduce((total, r) => total + value(r), 0);
      table.push({ lane: lane.label, state, extents: sum((r) => rows.extents[r]), elements: sum((r) => rows.numel[r] * rows.runs[r]), padding: sum((r) => rows.padding[r]), bytes: cell.bytes });
    }));
    const number = (name) => ({ title: name, right: true, value: (d) => d[name], cell: (d) => page.count(d[name]) });
    const columns = [{ title: "held by", value: (d) => d.lane }, { title: "state", value: (d) => d.state }, number("extents"), number("elements"), number("padding"), number("bytes")];
    return page.el("details", {}, page.el("summary", {}, "The layout as a table"), page.table("What each rank holds of each state", columns, table, { id: "lanes" }));
  }
};
