"use strict";
(() => {
  const started = performance.now();
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  $("data").textContent = "";
  const make = (tag, text, cls) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (cls) e.className = cls; return e; };

  // ---------------------------------------------------------------- decoding
  // Columns travel as base64 of LEB128 numbers; numbers may exceed 32 bits, so no bit shifts.
  function reader(b64) {
    const raw = atob(b64 || "");
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    let at = 0;
    return () => {
      let value = 0, scale = 1, byte;
      do { byte = bytes[at++]; value += (byte & 127) * scale; scale *= 128; } while (byte > 127);
      return value;
    };
  }
  const zigzag = (n) => (n % 2 ? -(n + 1) / 2 : n / 2);

  const frames = data.frames; // [name, file, line, flags]; flags: 1 Python, 2 inside a library
  const PY = 1;
  const trie = { parent: new Int32Array(data.trie.count), frame: new Int32Array(data.trie.count) };
  { const next = reader(data.trie.nodes);
    for (let i = 0; i < data.trie.count; i++) { trie.parent[i] = i - next(); trie.frame[i] = next(); } } // the root is its own parent
  const stacks = { node: new Int32Array(data.stacks.count), user: new Int32Array(data.stacks.count), op: new Int32Array(data.stacks.count) };
  { const next = reader(data.stacks.rows);
    for (let i = 0; i < data.stacks.count; i++) { stacks.node[i] = next(); stacks.user[i] = next() - 1; stacks.op[i] = next() - 1; } }
  const baseName = (file) => { const at = Math.max(file.lastIndexOf("/"), file.lastIndexOf("\\")); return at < 0 ? file : file.slice(at + 1); };
  const frameText = (f) => { const [name, file, line] = frames[f]; return name + (file && file !== "??" ? "  " + baseName(file) + (line ? ":" + line : "") : ""); };
  const frameLong = (f) => { const [name, file, line] = frames[f]; return name + (file && file !== "??" ? "  " + file + (line ? ":" + line : "") : ""); };
  function stackFrames(stack) { // innermost first
    const list = [];
    if (stack < 0) return list;
    for (let n = stacks.node[stack]; trie.parent[n] !== n; n = trie.parent[n]) list.push(trie.frame[n]);
    return list;
  }

  function decodeDevice(d) {
    if (d.ready) return d;
    d.ready = true;
    const s = d.segments, ns = s.count;
    d.sAddr = new Float64Array(ns); d.sSize = new Float64Array(ns); d.sStream = new Int32Array(ns); d.sKind = new Uint8Array(ns); d.sPool = new Int32Array(ns);
    d.sFrom = new Float64Array(ns); d.sTo = new Float64Array(ns);
    let next = reader(s.rows);
    for (let i = 0; i < ns; i++) {
      d.sAddr[i] = next(); d.sSize[i] = next(); d.sStream[i] = next(); d.sKind[i] = next(); d.sPool[i] = next();
      d.sFrom[i] = next(); const life = next(); d.sTo[i] = life ? d.sFrom[i] + life : Infinity;
    }
    const b = d.blocks, n = b.count, unit = b.unit;
    d.bSeg = new Int32Array(n); d.bOff = new Float64Array(n); d.bSize = new Float64Array(n); d.bSlack = new Float64Array(n);
    d.bFrom = new Float64Array(n); d.bReq = new Float64Array(n); d.bTo = new Float64Array(n); d.bStack = new Int32Array(n); d.bStream = new Int32Array(n);
    next = reader(b.rows);
    let from = 0;
    for (let i = 0; i < n; i++) {
      from += next(); d.bFrom[i] = from;
      d.bSeg[i] = next() - 1; d.bOff[i] = next() * unit; d.bSize[i] = next() * unit; d.bSlack[i] = next();
      const asked = next(); d.bReq[i] = asked ? from + asked : Infinity;
      const done = next(); d.bTo[i] = done ? d.bReq[i] + done - 1 : Infinity;
      d.bStack[i] = next() - 1; d.bStream[i] = next();
    }
    if (d.times) {
      next = reader(d.times);
      d.time = new Float64Array(d.events + 1);
      let t = 0;
      for (let i = 1; i <= d.events; i++) { t += zigzag(next()); d.time[i] = t; }
      if (d.events) d.time[0] = Math.min(0, d.time[1]);
      for (let i = 1; i <= d.events; i++) if (d.time[i] < d.time[i - 1]) d.time[i] = d.time[i - 1]; // a search needs order
    }
    // Totals after each event.
    const m = d.events + 1;
    d.allocated = new Float64Array(m); d.active = new Float64Array(m); d.reserved = new Float64Array(m);
    for (let i = 0; i < n; i++) {
      const size = d.bSize[i];
      if (d.bFrom[i] < m) { d.allocated[d.bFrom[i]] += size; d.active[d.bFrom[i]] += size; }
      if (d.bReq[i] < m) d.allocated[d.bReq[i]] -= size;
      if (d.bTo[i] < m) d.active[d.bTo[i]] -= size;
    }
    for (let i = 0; i < ns; i++) {
      if (d.sFrom[i] < m) d.reserved[d.sFrom[i]] += d.sSize[i];
      if (d.sTo[i] < m) d.reserved[d.sTo[i]] -= d.sSize[i];
    }
    d.peak = 0;
    for (let i = 1; i < m; i++) {
      d.allocated[i] += d.allocated[i - 1]; d.active[i] += d.active[i - 1]; d.reserved[i] += d.reserved[i - 1];
      if (d.active[i] > d.active[d.peak]) d.peak = i;
    }
    d.top = 1;
    for (let i = 0; i < m; i++) { if (d.reserved[i] > d.top) d.top = d.reserved[i]; if (d.active[i] > d.top) d.top = d.active[i]; }
    return d;
  }

  // ---------------------------------------------------------------- words
  function bytes(n) {
    if (n === undefined || n === null) return "unknown";
    const sign = n < 0 ? "-" : ""; let v = Math.abs(n);
    if (v < 1024) return sign + v + " B";
    for (const u of ["KiB", "MiB", "GiB", "TiB"]) { v /= 1024; if (v < 1024 || u === "TiB") return sign + (v >= 100 ? v.toFixed(1) : v.toFixed(2)) + " " + u; }
  }
  const count = (n) => n.toLocaleString("en-US");
  const percent = (a, b) => (b > 0 ? (100 * a / b).toFixed(1) + " %" : "");
  const hex = (d, offset) => "0x" + (BigInt(d.base) + BigInt(Math.round(offset))).toString(16);

  // ---------------------------------------------------------------- state
  const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8d00", "#7a5195", "#3c8d7a", "#b07aa1", "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#9c755f", "#5c6bc0", "#c2a500", "#00838f", "#ad6989"];
  const OTHER = "#8c959f";
  const state = { dev: 0, p: 0, x0: 0, x1: 1, axis: "event", group: "user", query: "", python: true, zoomNode: -1, mapScale: 1, mapOrder: "address", block: -1 };
  let d, groups, matches = null;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function canvas(id, height) {
    const c = $(id), ratio = window.devicePixelRatio || 1, w = Math.max(50, c.clientWidth), h = height || c.clientHeight;
    if (height) c.style.height = height + "px";
    const W = Math.round(w * ratio), H = Math.min(32000, Math.round(h * ratio));
    if (c.width !== W) c.width = W;
    if (c.height !== H) c.height = H;
    const g = c.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, w, h);
    g.font = "12px " + getComputedStyle(document.body).fontFamily;
    return { c, g, w, h };
  }

  // ---------------------------------------------------------------- grouping
  function groupKey(i) {
    const s = d.bStack[i];
    switch (state.group) {
      case "user": return s < 0 || stacks.user[s] < 0 ? -1 : stacks.user[s];
      case "op": return s < 0 || stacks.op[s] < 0 ? -1 : stacks.op[s];
      case "size": return d.bSize[i];
      case "stream": return d.bStream[i];
      default: return i;
    }
  }
  function groupName(key) {
    switch (state.group) {
      case "user": case "op": return key < 0 ? "unknown (no frames recorded)" : frameText(key);
      case "size": return "blocks of " + bytes(key);
      case "stream": return "stream " + d.streams[key];
      default: return "block " + hex(d, blockAddress(key)) + ", " + bytes(d.bSize[key]) + (d.bStack[key] >= 0 && stacks.user[d.bStack[key]] >= 0 ? ", " + frameText(stacks.user[d.bStack[key]]) : "");
    }
  }
  const blockAddress = (i) => (d.bSeg[i] >= 0 ? d.sAddr[d.bSeg[i]] : 0) + d.bOff[i];
  function regroup() {
    // Rank by bytes at the peak, then by bytes times lifetime, so that colours stay the same while the cursor moves.
    const weight = new Map(), n = d.blocks.count, m = d.events + 1;
    for (let i = 0; i < n; i++) {
      const key = groupKey(i), life = (Math.min(d.bTo[i], m) - d.bFrom[i]) / m;
      const w = d.bSize[i] * life * 0.5 + (d.bFrom[i] <= d.peak && d.peak < d.bTo[i] ? d.bSize[i] : 0);
      weight.set(key, (weight.get(key) || 0) + w);
    }
    const keys = [...weight.keys()].sort((a, b) => weight.get(b) - weight.get(a) || a - b);
    const shown = keys.slice(0, PALETTE.length), rank = new Map(shown.map((k, r) => [k, r]));
    groups = { rank, names: shown.map(groupName), other: keys.length - shown.length, of: new Uint8Array(n) };
    for (let i = 0; i < n; i++) { const r = rank.get(groupKey(i)); groups.of[i] = r === undefined ? shown.length : r; }
    groups.count = shown.length + (groups.other > 0 ? 1 : 0);
  }
  const colour = (r) => (r < PALETTE.length ? PALETTE[r] : OTHER);

  function search() {
    const q = state.query.trim().toLowerCase();
    matches = null;
    if (!q || /^0x[0-9a-f]+$/.test(q)) return;
    const hit = frames.map(([name, file, line]) => (name + " " + file + ":" + line).toLowerCase().includes(q));
    const nodeHit = new Uint8Array(data.trie.count);
    for (let i = 0; i < data.trie.count; i++) nodeHit[i] = (trie.parent[i] !== i && (nodeHit[trie.parent[i]] || hit[trie.frame[i]])) ? 1 : 0;
    matches = new Uint8Array(data.stacks.count);
    for (let i = 0; i < data.stacks.count; i++) matches[i] = nodeHit[stacks.node[i]];
  }
  const faded = (i) => matches !== null && !(d.bStack[i] >= 0 && matches[d.bStack[i]]);

  // ---------------------------------------------------------------- axis
  const xOf = (p) => (state.axis === "time" && d.time ? d.time[Math.max(0, Math.min(d.events, p))] : p);
  function pOf(x) {
    if (!(state.axis === "time" && d.time)) return Math.max(0, Math.min(d.events, Math.round(x)));
    let lo = 0, hi = d.events;
    while (lo < hi) { const mid = (lo + hi + 1) >> 1; if (d.time[mid] <= x) lo = mid; else hi = mid - 1; }
    return lo;
  }
  const full = () => { const a = xOf(0), b = xOf(d.events); return [a, b > a ? b : a + 1]; };
  function axisText(x) {
    if (state.axis !== "time" || !d.time) return x < 0.5 ? "start" : count(Math.round(x) - 1);
    const s = x / 1e6;
    return (Math.abs(state.x1 - state.x0) < 1e4 ? (x / 1e3).toFixed(3) + " ms" : s.toFixed(3) + " s");
  }

  // ---------------------------------------------------------------- chart
  const LEFT = 74, BOTTOM = 22, TOP = 8;
  let picture = null;
  function drawChart() {
    const { c, g, w, h } = canvas("chart");
    const plotW = w - LEFT - 4, plotH = h - TOP - BOTTOM, cols = Math.max(2, Math.floor(plotW));
    const { x0, x1 } = state, dx = (x1 - x0) / (cols - 1);
    const k = groups.count, series = [];
    for (let r = 0; r < k; r++) series.push(new Float64Array(cols + 1));
    const dimmed = matches ? new Float64Array(cols + 1) : null;
    const n = d.blocks.count, m = d.events;
    const column = (p) => (p > m ? cols : Math.max(0, Math.min(cols, Math.ceil((xOf(p) - x0) / dx - 1e-9))));
    for (let i = 0; i < n; i++) {
      const a = column(d.bFrom[i]), b = column(d.bTo[i]);
      if (a >= b) continue;
      const into = matches && faded(i) ? dimmed : series[groups.of[i]];
      into[a] += d.bSize[i]; into[b] -= d.bSize[i];
    }
    // The highest totals within each column, so that no spike is lost between two pixels.
    const high = new Float64Array(cols), reserved = new Float64Array(cols);
    // A moment lasts until the next event: round down, as the layers do.
    const momentAt = (x) => (state.axis === "time" && d.time ? pOf(x) : Math.max(0, Math.min(m, Math.floor(x + 1e-9))));
    let p = momentAt(x0);
    for (let col = 0; col < cols; col++) {
      const until = momentAt(x0 + (col + 1) * dx);
      let a = d.active[p], r = d.reserved[p];
      for (; p < until; p++) { if (d.active[p] > a) a = d.active[p]; if (d.reserved[p] > r) r = d.reserved[p]; }
      high[col] = a; reserved[col] = r;
    }
    let top = 1;
    for (let col = 0; col < cols; col++) top = Math.max(top, reserved[col], high[col]);
    const showTotal = d.capacity && d.capacity < top * 1.35;
    if (showTotal) top = Math.max(top, d.capacity);
    top *= 1.04;
    const y = (v) => TOP + plotH - v / top * plotH;
    // Axes.
    g.strokeStyle = css("--line"); g.fillStyle = css("--soft"); g.lineWidth = 1; g.textBaseline = "middle"; g.textAlign = "right";
    const step = niceStep(top / 5);
    for (let v = 0; v <= top; v += step) { const yy = Math.round(y(v)) + 0.5; g.beginPath(); g.moveTo(LEFT, yy); g.lineTo(w - 4, yy); g.stroke(); g.fillText(bytes(v), LEFT - 6, yy); }
    g.textBaseline = "top";
    for (let i = 0; i <= 6; i++) { const x = x0 + (x1 - x0) * i / 6; g.textAlign = i === 0 ? "left" : i === 6 ? "right" : "center"; g.fillText(axisText(x), LEFT + plotW * i / 6, h - BOTTOM + 5); }
    // Stacked holders, the largest at the bottom.
    const base = new Float64Array(cols);
    const layer = (values, fill) => {
      let run = 0, any = false;
      g.beginPath();
      const upper = new Float64Array(cols);
      for (let col = 0; col < cols; col++) { run += values[col]; if (run > 0.5) any = true; upper[col] = base[col] + Math.max(0, run); }
      if (!any) return;
      g.moveTo(LEFT, y(base[0]));
      for (let col = 0; col < cols; col++) { g.lineTo(LEFT + col, y(upper[col])); g.lineTo(LEFT + col + 1, y(upper[col])); }
      for (let col = cols - 1; col >= 0; col--) { g.lineTo(LEFT + col + 1, y(base[col])); g.lineTo(LEFT + col, y(base[col])); }
      g.closePath(); g.fillStyle = fill; g.fill();
      base.set(upper);
    };
    for (let r = 0; r < k; r++) layer(series[r], colour(r));
    if (dimmed) layer(dimmed, css("--free"));
    const line = (values, stroke, dash) => {
      g.beginPath(); g.setLineDash(dash); g.strokeStyle = stroke; g.lineWidth = 1.5;
      for (let col = 0; col < cols; col++) { const yy = y(values[col]); if (col) g.lineTo(LEFT + col, yy); else g.moveTo(LEFT, yy); g.lineTo(LEFT + col + 1, yy); }
      g.stroke(); g.setLineDash([]);
    };
    line(high, css("--fg"), []);
    line(reserved, css("--mark"), [6, 3]);
    // The names of the lines.
    g.textAlign = "left"; g.textBaseline = "middle";
    g.globalAlpha = 0.85; g.fillStyle = css("--bg"); g.fillRect(LEFT + 4, TOP + 2, 210, 16); g.globalAlpha = 1;
    g.lineWidth = 1.5; g.strokeStyle = css("--mark"); g.setLineDash([6, 3]); g.beginPath(); g.moveTo(LEFT + 8, TOP + 10); g.lineTo(LEFT + 30, TOP + 10); g.stroke();
    g.setLineDash([]); g.strokeStyle = css("--fg"); g.beginPath(); g.moveTo(LEFT + 96, TOP + 10); g.lineTo(LEFT + 118, TOP + 10); g.stroke();
    g.fillStyle = css("--fg"); g.fillText("reserved", LEFT + 36, TOP + 10); g.fillText("highest in use", LEFT + 124, TOP + 10);
    g.textBaseline = "bottom";
    if (showTotal) { const yy = Math.round(y(d.capacity)) + 0.5; g.strokeStyle = css("--soft"); g.setLineDash([2, 4]); g.beginPath(); g.moveTo(LEFT, yy); g.lineTo(w - 4, yy); g.stroke(); g.setLineDash([]); g.fillStyle = css("--soft"); g.textAlign = "right"; g.fillText("card: " + bytes(d.capacity), w - 8, yy - 2); }
    for (const oom of d.ooms) { const x = LEFT + (xOf(oom[0] + 1) - x0) / (x1 - x0) * plotW; if (x >= LEFT && x <= w) { g.fillStyle = css("--mark"); g.fillRect(x - 1, TOP, 2, plotH); g.textAlign = "left"; g.fillText("out of memory", x + 4, TOP + 14); } }
    picture = document.createElement("canvas");
    picture.width = c.width; picture.height = c.height;
    picture.getContext("2d").drawImage(c, 0, 0);
    drawCursor();
  }
  function niceStep(v) { let s = 512; while (s < v) s *= 2; return s; }
  function drawCursor() {
    const c = $("chart"), g = c.getContext("2d"), ratio = window.devicePixelRatio || 1, w = c.width / ratio, h = c.height / ratio;
    if (!picture) return;
    g.setTransform(1, 0, 0, 1, 0, 0); g.clearRect(0, 0, c.width, c.height); g.drawImage(picture, 0, 0);
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    const x = LEFT + (xOf(state.p) - state.x0) / (state.x1 - state.x0) * (w - LEFT - 4);
    if (x >= LEFT - 1 && x <= w) { g.strokeStyle = css("--accent"); g.lineWidth = 2; g.beginPath(); g.moveTo(x, 0); g.lineTo(x, h - BOTTOM); g.stroke(); }
  }

  // ---------------------------------------------------------------- holders at the cursor
  function alive(visit) {
    const n = d.blocks.count, p = state.p;
    for (let i = 0; i < n; i++) { if (d.bFrom[i] > p) break; if (d.bTo[i] > p) visit(i); }
  }
  function drawHolders() {
    const rows = new Map();
    let total = 0;
    alive((i) => { const r = groups.of[i]; let row = rows.get(r); if (!row) rows.set(r, row = [0, 0, 0]); row[0] += d.bSize[i]; row[1]++; if (!faded(i)) row[2]++; total += d.bSize[i]; });
    const body = $("holders").tBodies[0];
    body.replaceChildren();
    for (const [r, [sum, blocks, hits]] of [...rows].sort((a, b) => b[1][0] - a[1][0])) {
      const tr = make("tr"), name = make("td"), dot = make("span", "", "swatch");
      dot.style.background = colour(r);
      name.append(dot, r < groups.names.length ? groups.names[r] : "all others (" + count(groups.other) + ")");
      tr.append(name, make("td", bytes(sum), "n"), make("td", percent(sum, total), "n"), make("td", count(blocks), "n"));
      if (matches && !hits) tr.className = "dim";
      body.append(tr);
    }
    if (!rows.size) { const tr = make("tr"), td = make("td", "nothing is held at this moment"); td.colSpan = 4; tr.append(td); body.append(tr); }
  }

  // ---------------------------------------------------------------- flame graph
  let flameBoxes = [], flameFocus = null, flameRoot = null;
  function buildFlame() {
    const weights = new Map();
    alive((i) => { weights.set(d.bStack[i], (weights.get(d.bStack[i]) || 0) + d.bSize[i]); });
    const root = { frame: -1, value: 0, kids: new Map(), parent: null, hit: false };
    for (const [stack, value] of weights) {
      root.value += value;
      let at = root;
      if (stack < 0) { at = child(at, -2); at.value += value; continue; }
      const list = stackFrames(stack).reverse();
      const some = state.python && list.some((f) => frames[f][3] & PY);
      for (const f of list) {
        if (some && !(frames[f][3] & PY)) continue;
        at = child(at, f); at.value += value;
      }
    }
    return root;
  }
  function child(node, frame) { let kid = node.kids.get(frame); if (!kid) node.kids.set(frame, kid = { frame, value: 0, kids: new Map(), parent: node }); return kid; }
  const flameName = (node) => (node.frame === -1 ? "all" : node.frame === -2 ? "no frames recorded" : frameText(node.frame));
  const pathKey = (node) => { const keys = []; for (let n = node; n && n.frame !== -1; n = n.parent) keys.push(n.frame); return keys.reverse(); };
  let zoomPath = [];
  function drawFlame(keep) {
    if (!keep || !flameRoot) flameRoot = buildFlame();
    let zoomed = flameRoot;
    for (const f of zoomPath) { const kid = zoomed.kids.get(f); if (!kid) break; zoomed = kid; }
    const ROW = 18, total = zoomed.value || 1, width = Math.max(50, $("flame").clientWidth);
    flameBoxes = [];
    const up = [];
    for (let n = zoomed.parent; n; n = n.parent) up.unshift(n);
    up.forEach((n, depth) => flameBoxes.push({ node: n, x: 0, w: width, y: depth * ROW }));
    let deepest = 0;
    (function place(node, x, w, depth) {
      if (w < 0.7) return;
      deepest = Math.max(deepest, depth);
      flameBoxes.push({ node, x, w, y: depth * ROW });
      for (const kid of [...node.kids.values()].sort((a, b) => b.value - a.value)) { const kw = w * kid.value / (node.value || 1); place(kid, x, kw, depth + 1); x += kw; }
    })(zoomed, 0, width, up.length);
    const { g } = canvas("flame", (deepest + 1) * ROW + 4);
    const q = state.query.trim().toLowerCase();
    g.textBaseline = "middle"; g.textAlign = "left";
    for (const box of flameBoxes) {
      const { node, x, w, y } = box, f = node.frame;
      const hit = q && f >= 0 && (frames[f][0] + " " + frames[f][1] + ":" + frames[f][2]).toLowerCase().includes(q);
      const hue = f < 0 ? -1 : (f * 47) % 360;
      g.fillStyle = hit ? "#b3007a" : f < 0 ? css("--free") : (frames[f][3] & PY) ? (frames[f][3] & 2 ? "hsl(" + (195 + hue % 40) + " 45% 62%)" : "hsl(" + (28 + hue % 24) + " 85% 60%)") : "hsl(" + (120 + hue % 40) + " 22% 66%)";
      g.fillRect(x + 0.5, y + 0.5, Math.max(0.5, w - 1), ROW - 2);
      if (flameFocus === node) { g.strokeStyle = css("--fg"); g.lineWidth = 2; g.strokeRect(x + 1, y + 1, Math.max(1, w - 2), ROW - 3); }
      if (w > 30) {
        g.fillStyle = f < 0 ? css("--fg") : hit ? "#ffffff" : "#111111";
        g.save(); g.beginPath(); g.rect(x + 3, y, w - 6, ROW); g.clip();
        g.fillText(flameName(node) + "   " + bytes(node.value), x + 5, y + ROW / 2); g.restore();
      }
    }
    $("flame-where").textContent = bytes(zoomed.value) + " in " + flameName(zoomed);
  }
  const flameAt = (x, y) => flameBoxes.findLast((b) => y >= b.y && y < b.y + 18 && x >= b.x && x < b.x + b.w);
  const flameTip = (node) => flameName(node) + "\n" + bytes(node.value) + ", " + percent(node.value, flameRoot.value) + (node.frame >= 0 ? "\n" + frameLong(node.frame) : "");

  // ---------------------------------------------------------------- segment map
  let mapBoxes = [], mapRows = null;
  function drawMap() {
    const ns = d.segments.count, p = state.p, live = [];
    const held = new Map();
    for (let s = 0; s < ns; s++) if (d.sFrom[s] <= p && p < d.sTo[s]) { live.push(s); held.set(s, []); }
    let stray = 0;
    alive((i) => { const list = held.get(d.bSeg[i]); if (list) list.push(i); else stray += d.bSize[i]; });
    const free = (s) => d.sSize[s] - held.get(s).reduce((sum, i) => sum + d.bSize[i], 0);
    const order = state.mapOrder;
    if (order === "address") live.sort((a, b) => d.sAddr[a] - d.sAddr[b]);
    else if (order === "size") live.sort((a, b) => d.sSize[b] - d.sSize[a] || d.sAddr[a] - d.sAddr[b]);
    else { const f = new Map(live.map((s) => [s, free(s)])); live.sort((a, b) => f.get(b) - f.get(a) || d.sAddr[a] - d.sAddr[b]); }
    const total = live.reduce((sum, s) => sum + d.sSize[s], 0);
    const width = Math.max(50, $("map").clientWidth), ROW = 16, GAP = 2;
    const rowsWanted = Math.max(1, Math.min(1600, Math.round(24 * state.mapScale)));
    const scale = Math.max(width * rowsWanted - live.length * GAP, width) / Math.max(1, total); // pixels a byte
    mapBoxes = [];
    let cursor = 0;
    const spans = [];
    for (const s of live) {
      const w = Math.max(1.5, d.sSize[s] * scale);
      // A short segment is not broken over two rows.
      if (w < width && cursor % width + w > width) cursor = Math.ceil(cursor / width) * width;
      spans.push([s, cursor, w]); cursor += w + GAP;
    }
    const height = Math.max(1, Math.ceil(cursor / width)) * ROW + 2;
    const { g } = canvas("map", height);
    const paint = (at, w, fill, box, hatch) => {
      let x = at;
      const end = at + w;
      while (x < end - 1e-6) {
        const row = Math.floor(x / width), stop = Math.min(end, (row + 1) * width), px = x - row * width;
        const item = { x: px, y: row * ROW, w: stop - x, ...box };
        mapBoxes.push(item);
        g.fillStyle = fill; g.fillRect(px, row * ROW + 1, Math.max(0.6, stop - x), ROW - 3);
        if (hatch && stop - x > 3) {
          g.save(); g.beginPath(); g.rect(px, row * ROW + 1, stop - x, ROW - 3); g.clip(); g.strokeStyle = css("--hatch"); g.lineWidth = 1; g.beginPath();
          for (let k = -ROW; k < stop - x; k += 5) { g.moveTo(px + k, row * ROW + ROW); g.lineTo(px + k + ROW, row * ROW); }
          g.stroke(); g.restore();
        }
        if (box.block >= 0 && box.block === state.block) { g.strokeStyle = css("--fg"); g.lineWidth = 2; g.strokeRect(px + 1, row * ROW + 1, Math.max(2, stop - x - 2), ROW - 4); }
        x = stop;
      }
    };
    let freeBytes = 0, emptySegments = 0, emptyBytes = 0;
    for (const [s, at, w] of spans) {
      const list = held.get(s).sort((a, b) => d.bOff[a] - d.bOff[b]), k = w / d.sSize[s];
      if (!list.length) { emptySegments++; emptyBytes += d.sSize[s]; }
      let end = 0;
      const hole = (from, to) => { freeBytes += to - from; paint(at + from * k, (to - from) * k, css("--free"), { seg: s, block: -1, from, to }, true); };
      for (const i of list) {
        if (d.bOff[i] > end) hole(end, d.bOff[i]);
        const pending = d.bReq[i] <= p;
        paint(at + d.bOff[i] * k, d.bSize[i] * k, faded(i) ? css("--hatch") : colour(groups.of[i]), { seg: s, block: i }, pending);
        end = Math.max(end, d.bOff[i] + d.bSize[i]);
      }
      if (end < d.sSize[s]) hole(end, d.sSize[s]);
    }
    mapRows = ROW;
    $("map-where").textContent = count(live.length) + " segments, " + bytes(total) + " reserved, " + bytes(freeBytes) + " free inside; " + count(emptySegments) + " wholly free (" + bytes(emptyBytes) + ")" + (stray ? "; " + bytes(stray) + " in segments that the recording does not show" : "");
  }
  const mapAt = (x, y) => mapBoxes.findLast((b) => y >= b.y && y < b.y + mapRows && x >= b.x && x < b.x + b.w + 0.6);
  const KINDS = ["large", "small"];
  function segText(s) { return "segment " + hex(d, d.sAddr[s]) + ", " + bytes(d.sSize[s]) + ", " + (KINDS[d.sKind[s] & 1]) + ((d.sKind[s] & 2) ? ", expandable" : "") + ", stream " + d.streams[d.sStream[s]] + (d.sPool[s] ? ", private pool " + d.pools[d.sPool[s]] : ""); }
  function blockText(i) {
    const s = d.bStack[i], pending = d.bReq[i] <= state.p;
    return bytes(d.bSize[i]) + " at " + hex(d, blockAddress(i)) + (d.bSlack[i] ? " (asked for " + count(d.bSize[i] - d.bSlack[i]) + " B)" : "") +
      "\n" + (d.bFrom[i] === 0 ? "allocated before the recording" : "allocated by event " + count(d.bFrom[i] - 1)) +
      (d.bReq[i] === Infinity ? ", alive at the end" : ", freed by event " + count(d.bReq[i] - 1)) + (pending ? ", waiting for a stream" : "") +
      (s >= 0 && stacks.user[s] >= 0 ? "\n" + frameLong(stacks.user[s]) : s < 0 ? "\nno frames recorded" : "");
  }
  const mapTip = (b) => (b.block >= 0 ? blockText(b.block) : bytes(b.to - b.from) + " free") + "\n" + segText(b.seg);
  function showDetail() {
    const box = $("detail");
    box.replaceChildren();
    const i = state.block;
    if (i < 0) return;
    box.append(make("strong", blockText(i).split("\n").slice(0, 2).join("; ")));
    const list = make("ol");
    for (const f of stackFrames(d.bStack[i])) list.append(make("li", frameLong(f), (frames[f][3] & 3) === PY ? "py" : ""));
    if (!list.children.length) list.append(make("li", "no frames recorded"));
    box.append(list);
  }

  // ---------------------------------------------------------------- fixed tables
  function drawSplit() {
    const box = $("split");
    box.replaceChildren();
    const bar = make("div", "", "bar"), list = make("ul", undefined, "legend");
    const total = d.split.reduce((s, x) => s + x[2], 0);
    d.split.forEach(([key, label, value], k) => {
      if (!value) return;
      const fill = key === "allocated" ? "#0072b2" : PALETTE[(k + 1) % PALETTE.length];
      const part = make("div"); part.style.flexGrow = value / total; part.style.background = fill; part.title = label + ": " + bytes(value);
      bar.append(part);
      const li = make("li"), dot = make("span", "", "swatch"); dot.style.background = fill;
      li.append(dot, make("span", label), make("b", bytes(value) + "  " + percent(value, total)));
      list.append(li);
    });
    if (total) box.append(bar);
    box.append(list);
    for (const line of d.lines) box.append(make("p", line));
  }
  function drawPins() {
    const body = $("pins").tBodies[0];
    body.replaceChildren();
    for (const row of d.pins) { const tr = make("tr"); tr.append(make("td", row[0]), make("td", bytes(row[1]), "n"), make("td", bytes(row[2]), "n"), make("td", row[3]), make("td", row[4])); body.append(tr); }
    if (!d.pins.length) { const tr = make("tr"), td = make("td", "no segment is held by a part of itself"); td.colSpan = 5; tr.append(td); body.append(tr); }
  }
  function drawCompare() {
    if (!data.compare.length) return;
    $("s-compare").hidden = false;
    const body = $("compare").tBodies[0], most = Math.max(...data.compare.map((r) => r.peak_reserved || 0), 1), base = data.compare[0].peak_reserved;
    body.replaceChildren();
    for (const r of data.compare) {
      const tr = make("tr"), cell = make("td", "", "n"), gauge = make("span", "", "gauge" + (r.completes === false ? " bad" : ""));
      gauge.style.width = Math.round(160 * (r.peak_reserved || 0) / most) + "px";
      cell.append(gauge, bytes(r.peak_reserved));
      const change = r.peak_reserved && base ? (100 * (r.peak_reserved - base) / base) : 0;
      tr.append(make("td", r.label), cell, make("td", (change > 0 ? "+" : "") + change.toFixed(1) + " %", "n"), make("td", bytes(r.peak_allocated), "n"), make("td", r.peak_allocated && r.peak_reserved ? percent(r.peak_allocated, r.peak_reserved) : "", "n"), make("td", r.retries === null || r.retries === undefined ? "" : count(r.retries), "n"), make("td", r.note || ""));
      body.append(tr);
    }
  }
  function drawNotes() {
    const box = $("notes");
    box.replaceChildren();
    if (!d.events) box.append(make("p", "No events were recorded: the page shows the moment of the snapshot, and no time before it."));
    for (const note of [...data.notes, ...d.notes]) box.append(make("p", note));
    const marks = $("annotations");
    marks.replaceChildren();
    for (const [event, text] of d.marks.slice(0, 400)) { const b = make("button", (event ? "after event " + count(event - 1) : "before the first event") + ": " + text); b.type = "button"; b.addEventListener("click", () => moveTo(event)); marks.append(b); }
  }

  // ---------------------------------------------------------------- moving
  let queued = 0, wantChart = false;
  function schedule(chart) {
    wantChart = wantChart || chart;
    if (queued) return;
    queued = requestAnimationFrame(() => { queued = 0; const c = wantChart; wantChart = false; render(c); });
  }
  function render(chart) {
    const begin = performance.now();
    if (chart) drawChart(); else drawCursor();
    drawHolders(); drawFlame(); drawMap(); showDetail(); words();
    document.documentElement.dataset[chart ? "chartMs" : "moveMs"] = (performance.now() - begin).toFixed(1);
  }
  function words() {
    const p = state.p, when = d.time && p > 0 ? ", " + ((d.time[p] - d.time[0]) / 1e3).toFixed(3) + " ms" : "";
    const at = p === 0 ? "before the first event" : "after event " + count(p - 1) + " (of 0 to " + count(d.events - 1) + ")";
    const text = at + when + ": allocated " + bytes(d.allocated[p]) + ", active " + bytes(d.active[p]) + ", reserved " + bytes(d.reserved[p]);
    $("where").textContent = text;
    for (const e of document.querySelectorAll(".at")) e.textContent = at;
    const chart = $("chart");
    chart.setAttribute("aria-valuemax", d.events); chart.setAttribute("aria-valuenow", p); chart.setAttribute("aria-valuetext", text);
    $("slider").value = p;
  }
  function moveTo(p) { p = Math.max(0, Math.min(d.events, Math.round(p))); if (p === state.p) return; state.p = p; saveHash(); schedule(false); }
  function zoom(factor, centre) {
    const [a, b] = full(), span = Math.max((state.x1 - state.x0) * factor, (b - a) * 1e-6, state.axis === "event" ? 4 : 1);
    if (span >= b - a) { state.x0 = a; state.x1 = b; } else {
      const part = (centre - state.x0) / (state.x1 - state.x0);
      let x0 = centre - part * span;
      x0 = Math.max(a, Math.min(b - span, x0)); state.x0 = x0; state.x1 = x0 + span;
    }
    schedule(true);
  }
  function findAddress() {
    const q = state.query.trim().toLowerCase();
    if (!/^0x[0-9a-f]+$/.test(q)) return;
    const offset = Number(BigInt(q) - BigInt(d.base));
    state.block = -1;
    alive((i) => { const a = blockAddress(i); if (a <= offset && offset < a + d.bSize[i]) state.block = i; });
  }
  function saveHash() {
    const parts = ["event=" + (state.p - 1)]; // -1: before the first event
    if (state.dev) parts.push("dev=" + state.dev);
    if (state.group !== "user") parts.push("group=" + state.group);
    if (state.axis !== "event") parts.push("axis=" + state.axis);
    if (state.query) parts.push("q=" + encodeURIComponent(state.query));
    history.replaceState(null, "", "#" + parts.join("&"));
  }
  function choose(dev) {
    state.dev = dev; d = decodeDevice(data.devices[dev]);
    state.p = d.events ? d.peak : 0; state.block = -1; zoomPath = [];
    if (!d.time && state.axis === "time") state.axis = "event";
    $("axis").value = state.axis; $("axis").querySelector("[value=time]").disabled = !d.time;
    [state.x0, state.x1] = full();
    $("slider").max = d.events;
    search(); regroup(); drawSplit(); drawPins(); drawNotes();
  }

  // ---------------------------------------------------------------- nothing to show
  if (!data.devices.length) {
    document.title = $("title").textContent = "GPU memory: " + data.title;
    $("notes").replaceChildren(make("p", "The snapshot holds no segments and no events, so there is nothing to show."), ...data.notes.map((note) => make("p", note)));
    for (const section of document.querySelectorAll("main > section")) section.hidden = true;
    for (const control of $("controls").children) if (control.id !== "theme") control.hidden = true;
    $("theme").addEventListener("click", () => { const root = document.documentElement; root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; });
    drawCompare();
    document.documentElement.dataset.ready = "1";
    return;
  }

  // ---------------------------------------------------------------- wiring
  const tip = $("tip");
  function showTip(event, text) {
    if (!text) { tip.hidden = true; return; }
    tip.textContent = text; tip.hidden = false;
    const r = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - r.width - 6)) + "px";
    tip.style.top = (event.clientY + 18 + r.height > innerHeight ? Math.max(4, event.clientY - r.height - 10) : event.clientY + 16) + "px";
  }
  const local = (event) => { const r = event.currentTarget.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
  const chartX = (x) => { const w = $("chart").clientWidth; return state.x0 + Math.max(0, Math.min(1, (x - LEFT) / (w - LEFT - 4))) * (state.x1 - state.x0); };

  const chart = $("chart");
  let dragging = false;
  chart.addEventListener("pointerdown", (e) => { dragging = true; chart.setPointerCapture(e.pointerId); moveTo(pOf(chartX(local(e)[0]))); });
  chart.addEventListener("pointerup", () => { dragging = false; });
  chart.addEventListener("pointermove", (e) => {
    const p = pOf(chartX(local(e)[0]));
    if (dragging) moveTo(p);
    showTip(e, (p ? "after event " + count(p - 1) : "before the first event") + "\nallocated " + bytes(d.allocated[p]) + "\nactive " + bytes(d.active[p]) + "\nreserved " + bytes(d.reserved[p]));
  });
  chart.addEventListener("wheel", (e) => { e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : 0.8, chartX(local(e)[0])); }, { passive: false });
  const keys = (e) => {
    const stepBig = Math.max(1, Math.round((pOf(state.x1) - pOf(state.x0)) / 100));
    const step = e.shiftKey ? stepBig : 1;
    switch (e.key) {
      case "ArrowRight": case "ArrowUp": moveTo(state.p + step); break;
      case "ArrowLeft": case "ArrowDown": moveTo(state.p - step); break;
      case "PageUp": moveTo(state.p + stepBig * 10); break;
      case "PageDown": moveTo(state.p - stepBig * 10); break;
      case "Home": moveTo(0); break;
      case "End": moveTo(d.events); break;
      case "+": case "=": zoom(0.5, xOf(state.p)); break;
      case "-": zoom(2, xOf(state.p)); break;
      case "0": [state.x0, state.x1] = full(); schedule(true); break;
      default: return;
    }
    e.preventDefault();
  };
  $("slider").addEventListener("input", (e) => moveTo(Number(e.target.value)));
  $("peak").addEventListener("click", () => moveTo(d.peak));
  $("zoom-in").addEventListener("click", () => zoom(0.5, xOf(state.p)));
  $("zoom-out").addEventListener("click", () => zoom(2, xOf(state.p)));
  $("zoom-reset").addEventListener("click", () => { [state.x0, state.x1] = full(); schedule(true); });

  const flame = $("flame");
  flame.addEventListener("pointermove", (e) => { const box = flameAt(...local(e)); showTip(e, box && flameTip(box.node)); });
  flame.addEventListener("click", (e) => { const box = flameAt(...local(e)); if (box) { flameFocus = box.node; zoomPath = pathKey(box.node); drawFlame(true); } });
  flame.addEventListener("keydown", (e) => {
    const now = flameBoxes.find((b) => b.node === flameFocus) || flameBoxes[0];
    if (!now) return;
    const kids = (n) => [...n.kids.values()].sort((a, b) => b.value - a.value);
    let to = null;
    switch (e.key) {
      case "ArrowDown": to = kids(now.node)[0]; break;
      case "ArrowUp": to = now.node.parent; break;
      case "ArrowLeft": case "ArrowRight": if (now.node.parent) { const list = kids(now.node.parent), at = list.indexOf(now.node) + (e.key === "ArrowRight" ? 1 : -1); to = list[at]; } break;
      case "Enter": zoomPath = pathKey(now.node); to = now.node; break;
      case "Escape": zoomPath = []; to = flameRoot; break;
      default: return;
    }
    e.preventDefault();
    if (to) { flameFocus = to; drawFlame(true); $("flame-where").textContent = flameTip(to).replace(/\n/g, ", "); }
  });
  $("flame-reset").addEventListener("click", () => { zoomPath = []; drawFlame(true); });
  $("python-only").addEventListener("change", (e) => { state.python = e.target.checked; zoomPath = []; drawFlame(); });

  const map = $("map");
  map.addEventListener("pointermove", (e) => { const box = mapAt(...local(e)); showTip(e, box && mapTip(box)); });
  map.addEventListener("click", (e) => { const box = mapAt(...local(e)); state.block = box ? box.block : -1; drawMap(); showDetail(); });
  map.addEventListener("keydown", (e) => {
    const list = mapBoxes.filter((b) => b.block >= 0);
    if (!list.length) return;
    let at = list.findIndex((b) => b.block === state.block);
    if (e.key === "ArrowRight" || e.key === "ArrowDown") at = Math.min(list.length - 1, at + 1);
    else if (e.key === "ArrowLeft" || e.key === "ArrowUp") at = Math.max(0, at - 1);
    else if (e.key === "Escape") { state.block = -1; drawMap(); showDetail(); return; }
    else return;
    e.preventDefault();
    state.block = list[at].block;
    drawMap(); showDetail();
    const box = map.parentElement, y = list[at].y;
    if (y < box.scrollTop || y > box.scrollTop + box.clientHeight - 20) box.scrollTop = Math.max(0, y - 60);
  });
  $("map-in").addEventListener("click", () => { state.mapScale = Math.min(64, state.mapScale * 2); drawMap(); });
  $("map-out").addEventListener("click", () => { state.mapScale = Math.max(0.125, state.mapScale / 2); drawMap(); });
  $("map-order").addEventListener("change", (e) => { state.mapOrder = e.target.value; drawMap(); });
  for (const id of ["chart", "flame", "map"]) $(id).addEventListener("pointerleave", () => { tip.hidden = true; });

  $("device").addEventListener("change", (e) => { choose(Number(e.target.value)); saveHash(); schedule(true); });
  $("group").addEventListener("change", (e) => { state.group = e.target.value; regroup(); saveHash(); schedule(true); });
  $("axis").addEventListener("change", (e) => { state.axis = e.target.value; [state.x0, state.x1] = full(); saveHash(); schedule(true); });
  let typing = 0;
  $("query").addEventListener("input", (e) => { state.query = e.target.value; clearTimeout(typing); typing = setTimeout(() => { search(); findAddress(); saveHash(); schedule(true); }, 120); });
  $("theme").addEventListener("click", () => {
    const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark"; schedule(true);
  });
  $("help-button").addEventListener("click", () => $("help").showModal());
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) return;
    if (e.key === "/") { e.preventDefault(); $("query").focus(); }
    else if (e.key === "?") { e.preventDefault(); $("help").showModal(); }
    else if (e.key === "p" || e.key === "P") moveTo(d.peak);
    // The flame graph, the map and the slider have arrow keys of their own; everywhere else keys move through the recording.
    else if (!e.defaultPrevented && !$("help").open && ![flame, map].includes(e.target) && !(e.target.tagName === "BUTTON" && e.key === " ")) keys(e);
  });
  new ResizeObserver(() => { if (d) schedule(true); }).observe($("s-time"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => schedule(true));

  function fromHash() {
    const want = new URLSearchParams(location.hash.slice(1));
    if (["user", "op", "size", "stream", "block"].includes(want.get("group"))) state.group = want.get("group");
    if (["event", "time"].includes(want.get("axis"))) state.axis = want.get("axis");
    if (want.get("theme") === "dark" || want.get("theme") === "light") document.documentElement.dataset.theme = want.get("theme");
    state.query = want.get("q") || "";
    $("group").value = state.group; $("query").value = state.query;
    const dev = Number(want.get("dev") || 0);
    choose(Number.isInteger(dev) && data.devices[dev] ? dev : 0);
    const event = want.get("event");
    if (event !== null && Number.isFinite(Number(event))) state.p = Math.max(0, Math.min(d.events, Math.round(Number(event)) + 1));
    $("device").value = state.dev;
    findAddress();
  }
  document.title = "GPU memory: " + data.title;
  $("title").textContent = "GPU memory: " + data.title;
  data.devices.forEach((dev, i) => { const o = make("option", String(dev.id)); o.value = i; $("device").append(o); });
  fromHash();
  addEventListener("hashchange", () => { fromHash(); schedule(true); });
  drawCompare();
  render(true);
  document.documentElement.dataset.loadMs = (performance.now() - started).toFixed(1);
  document.documentElement.dataset.ready = "1";
})();
