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

  nbytes(r) {
    return (this.rows.numel[r] * this.rows.runs[r] + this.rows.padding[r]) * this.rows.width[r];
  }

  /* Where each tensor begins when all are put one behind the other, in the order of the module. */
  placeTensors() {
    let at = 0;
    this.begin = this.tensors.numel.map((n) => {
      const begin = at;
      at += n;
      return begin;
    });
    this.elements = at;
  }

  /* The extents of one state in one lane, in the order of its files. */
  cell(s, l) {
    const key = s * this.lanes.length + l;
    let found = this.cache.get(key);
    if (found) return found;
    const { rows } = this,
      cell = this.cells[s][l],
      n = cell.row.length;
    const place = (k) => [
      this.order.get(rows.file[cell.row[k]] + cell.step[k] * rows.file_step[cell.row[k]]),
      rows.offset[cell.row[k]] + cell.step[k] * rows.offset_step[cell.row[k]],
    ];
    const places = Array.from({ length: n }, (_, k) => place(k));
    const order = Array.from({ length: n }, (_, k) => k).sort(
      (a, b) => places[a][0] - places[b][0] || places[a][1] - places[b][1],
    );
    found = {
      n,
      row: new Int32Array(n),
      step: new Int32Array(n),
      x: new Float64Array(n),
      held: new Float64Array(n),
      all: new Float64Array(n),
      m: new Float64Array(n),
      span: new Float64Array(n),
    };
    let x = 0;
    order.forEach((k, at) => {
      const r = cell.row[k],
        i = cell.step[k];
      found.row[at] = r;
      found.step[at] = i;
      found.x[at] = x;
      found.held[at] = rows.numel[r] * rows.runs[r] * rows.width[r];
      found.all[at] = this.nbytes(r);
      x += found.all[at];
      const folded = rows.extents[r] > 1;
      found.m[at] = this.begin[rows.tensor[r]] + (folded ? 0 : rows.start[r] + i * rows.start_step[r]);
      found.span[at] = folded
        ? this.tensors.numel[rows.tensor[r]]
        : rows.runs[r] > 1
          ? (rows.runs[r] - 1) * rows.pitch[r] + rows.numel[r]
          : rows.numel[r];
    });
    if (this.cache.size > 6000) this.cache.clear();
    this.cache.set(key, found);
    return found;
  }

  /* One extent as facts for people. */
  describe(r, i) {
    const { rows, tensors } = this,
      t = rows.tensor[r],
      file = rows.file[r] + i * rows.file_step[r];
    const offset = rows.offset[r] + i * rows.offset_step[r],
      start = rows.start[r] + i * rows.start_step[r];
    const held = rows.numel[r] * rows.runs[r];
    const lane = this.lanes.find((each) => each.files.includes(file));
    return {
      tensor: t,
      name: tensors.name[t],
      state: this.states[rows.state[r]],
      dtype: this.data.layout.dtypes[rows.dtype[r]],
      shape: tensors.shape[t],
      lane: lane.label,
      elements:
        rows.extents[r] > 1
          ? `${page.count(held)} of ${page.count(tensors.numel[t])}, in ${page.count(rows.extents[r])} extents`
          : !held
            ? "none, only padding"
            : rows.runs[r] > 1
              ? `${page.count(rows.runs[r])} runs of ${page.count(rows.numel[r])}, from ${page.count(start)}, every ${page.count(rows.pitch[r])}`
              : `${page.count(start)} to ${page.count(start + held)} of ${page.count(tensors.numel[t])}`,
      start,
      held,
      file: this.files[file]?.name ?? `file ${file}`,
      offset,
      end: offset + held * rows.width[r],
      padding: rows.padding[r],
      replica: !!rows.replica[r],
      woven: rows.runs[r] > 1,
    };
  }

  marks(t) {
    const { kind, expert, tied, count } = this.tensors;
    return [
      kind[t] !== "trained" ? kind[t] : "",
      expert[t] ? "expert" : "",
      tied[t] ? "tied" : "",
      count[t] > 1 ? `stands for ${page.count(count[t])} tensors` : "",
    ].filter(Boolean);
  }

  tied(t) {
    return Object.entries(this.data.checkpoint.aliases)
      .filter(([, stored]) => stored === this.tensors.name[t])
      .map(([alias]) => alias);
  }

  colours() {
    const { tensors, data } = this,
      { layers, dtypes } = data.layout,
      P = page.PALETTE;
    const grey = page.dark() ? "#8b93a1" : "#8a919e";
    const layerColour = (at) =>
      page.ramp(layers.length > 1 ? at / (layers.length - 1) : 0.3, page.dark() ? 0.14 : 0.03, 0.95);
    const few = layers.length <= 8 ? layers.map((name, at) => [layerColour(at), name]) : null;
    const kindOf = (t) =>
      tensors.kind[t] !== "trained"
        ? tensors.kind[t]
        : tensors.expert[t]
          ? "expert"
          : tensors.tied[t]
            ? "tied"
            : "trained";
    const kinds = { trained: P[0], expert: P[1], tied: P[2], frozen: P[4], buffer: P[3] };
    const groups = [...new Set(tensors.group)].sort((a, b) => a - b);
    const groupName = (g) => (g === -2 ? "no group (frozen, buffers)" : g === -1 ? "group unknown" : `group ${g}`);
    const groupColour = (g) => (g < 0 ? grey : P[g % 8]);
    const modes = {
      layer: { of: (r) => layerColour(tensors.layer[this.rows.tensor[r]]), ramp: few ? null : layers, legend: few },
      group: {
        of: (r) => groupColour(tensors.group[this.rows.tensor[r]]),
        legend: groups.map((g) => [groupColour(g), groupName(g)]),
      },
      dtype: { of: (r) => P[this.rows.dtype[r] % 8], legend: dtypes.map((d, i) => [P[i % 8], page.dtype(d)]) },
      state: { of: (r) => P[this.rows.state[r] % 8], legend: this.states.map((s, i) => [P[i % 8], s]) },
      kind: {
        of: (r) => kinds[kindOf(this.rows.tensor[r])],
        legend: Object.entries(kinds)
          .filter(([k]) => tensors.kind.some((_, t) => kindOf(t) === k))
          .map(([k, c]) => [c, k]),
      },
    };
    return modes[this.colouring];
  }
};
