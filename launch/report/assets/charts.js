"use strict";
// Small SVG charts: lines, stacked bars, histograms. Colours are CSS variables, so that they follow the theme.

const NS = "http://www.w3.org/2000/svg";
const PAD = { left: 52, right: 14, top: 10, bottom: 26 };

function svgEl(name, attributes, parent) {
  const node = document.createElementNS(NS, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(node);
  return node;
}

function htmlEl(name, className, parent, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

const finite = (v) => typeof v === "number" && isFinite(v);

function short(v) {
  if (!finite(v)) return "-";
  const a = Math.abs(v);
  if (a === 0) return "0";
  if (a >= 1e9) return trim(v / 1e9) + "G";
  if (a >= 1e6) return trim(v / 1e6) + "M";
  if (a >= 1e4) return trim(v / 1e3) + "k";
  if (a >= 0.001) return trim(v);
  return v.toExponential(1).replace("e-0", "e-").replace("e+", "e");
}

function trim(v) {
  return String(Number(v.toPrecision(4)));
}

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw - 1e-12) || raw;
  const out = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) out.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return out;
}

// A chart redraws itself whenever its width changes; `draw(svg, width, height)` returns hover(xPixel) or nothing.
function chart(host, height, legend, draw) {
  if (legend.length > 1) {
    const box = htmlEl("div", "legend", host);
    for (const item of legend) {
      const entry = htmlEl("span", "", box);
      const swatch = htmlEl("i", "", entry);
      swatch.style.background = item.color;
      if (item.faint || item.opacity) swatch.style.opacity = item.opacity ? 2 * item.opacity : 0.4;
      entry.append(item.name);
    }
  }
  const frame = htmlEl("div", "chart", host);
  const tip = htmlEl("div", "tip", frame);
  let hover = null;
  const paint = () => {
    const width = frame.clientWidth;
    if (!width) return;
    frame.querySelectorAll("svg").forEach((old) => old.remove());
    const svg = svgEl("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    frame.prepend(svg);
    hover = draw(svg, width, height);
  };
  frame.addEventListener("mousemove", (event) => {
    const x = event.clientX - frame.getBoundingClientRect().left;
    const rows = hover && hover(x);
    tip.style.display = rows ? "block" : "none";
    if (rows) placeTip(tip, frame, rows, x, event.clientY - frame.getBoundingClientRect().top);
  });
  frame.addEventListener("mouseleave", () => {
    tip.style.display = "none";
    if (hover) hover(-1);
  });
  new ResizeObserver(paint).observe(frame);
  paint();
}

function placeTip(tip, frame, rows, x, y) {
  tip.replaceChildren();
  htmlEl("b", "", tip, rows.title);
  for (const row of rows.items) {
    const line = htmlEl("div", "", tip);
    if (row.color) htmlEl("i", "", line).style.background = row.color;
    line.append(`${row.name}  `);
    htmlEl("b", "", line, row.value);
  }
  const left = x + 14 + tip.offsetWidth > frame.clientWidth ? x - 14 - tip.offsetWidth : x + 14;
  tip.style.left = `${Math.max(left, 0)}px`;
  tip.style.top = `${Math.max(y - tip.offsetHeight / 2, 0)}px`;
}

function axes(svg, width, height, xs, ys, options) {
  const inner = { x0: PAD.left, x1: width - PAD.right, y0: height - PAD.bottom, y1: PAD.top };
  const [xLow, xHigh] = xs[0] === xs[1] ? [xs[0] - 0.5, xs[1] + 0.5] : xs;
  const map = options.log ? (v) => Math.log10(v) : (v) => v;
  const [yLow, yHigh] = ys;
  const X = (v) => inner.x0 + ((v - xLow) / (xHigh - xLow)) * (inner.x1 - inner.x0);
  const Y = (v) => inner.y0 - ((map(v) - yLow) / (yHigh - yLow || 1)) * (inner.y0 - inner.y1);
  const marks = options.log
    ? Array.from({ length: Math.floor(yHigh) - Math.ceil(yLow) + 1 }, (_, i) => 10 ** (Math.ceil(yLow) + i))
    : ticks(yLow, yHigh, 4);
  for (const v of marks) {
    svgEl("line", { x1: inner.x0, x2: inner.x1, y1: Y(v), y2: Y(v), stroke: "var(--grid)" }, svg);
    const text = svgEl("text", { x: inner.x0 - 8, y: Y(v) + 4, "text-anchor": "end", class: "axis" }, svg);
    text.textContent = short(v);
  }
  const whole = ticks(xLow, xHigh, Math.min(10, width / 70)).filter((v) => Number.isInteger(v) || !options.whole);
  for (const v of whole) {
    const text = svgEl("text", { x: X(v), y: height - 8, "text-anchor": "middle", class: "axis" }, svg);
    text.textContent = short(v);
  }
  svgEl("line", { x1: inner.x0, x2: inner.x1, y1: inner.y0, y2: inner.y0, stroke: "var(--line)" }, svg);
  return { X, Y, inner };
}

function range(values, options) {
  const kept = values.filter((v) => finite(v) && (!options.log || v > 0)).map((v) => (options.log ? Math.log10(v) : v));
  if (!kept.length) return null;
  let low = kept.reduce((a, b) => Math.min(a, b));
  let high = kept.reduce((a, b) => Math.max(a, b));
  if (options.log) return [Math.floor(low), Math.max(Math.ceil(high), Math.floor(low) + 1)];
  if (options.zero && low > 0) low = 0;
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const air = (high - low) * 0.06;
  return [options.zero && low === 0 ? 0 : low - air, high + air];
}

// series: [{name, color, x, y, dots, faint, dash, quiet}], or a band from `low` to y; options: {height, log, zero, unit, title, marks: [{x, label}]}
function lineChart(host, series, options = {}) {
  series = series.filter((s) => s.y.some(finite));
  const ys = range(series.flatMap((s) => [...s.y, ...(s.low || [])]), options);
  if (!ys) return void htmlEl("div", "empty", host, "No data recorded");
  const allX = series.flatMap((s) => s.x);
  const xs = [Math.min(...allX), Math.max(...allX)];
  const shown = series.filter((s) => !s.quiet);
  chart(host, options.height || 230, shown, (svg, width, height) => {
    const { X, Y, inner } = axes(svg, width, height, xs, ys, { ...options, whole: true });
    drawMarks(svg, options.marks || [], X, inner);
    for (const s of series) (s.low ? drawBand : drawLine)(svg, s, X, Y, options);
    const cursor = svgEl("line", { y1: inner.y1, y2: inner.y0, stroke: "var(--faint)", "stroke-dasharray": "3 3", opacity: 0 }, svg);
    const every = [...new Set(allX)].sort((a, b) => a - b);
    return (px) => {
      cursor.setAttribute("opacity", px < inner.x0 - 8 || px > inner.x1 + 8 ? 0 : 1);
      if (px < inner.x0 - 8 || px > inner.x1 + 8) return null;
      const x = every.reduce((best, v) => (Math.abs(X(v) - px) < Math.abs(X(best) - px) ? v : best), every[0]);
      cursor.setAttribute("x1", X(x));
      cursor.setAttribute("x2", X(x));
      const items = shown
        .map((s) => ({ s, i: s.x.indexOf(x) }))
        .map(({ s, i }) => ({
          name: s.name,
          color: s.color,
          value: (s.low && finite(s.low[i]) ? `${short(s.low[i])} to ` : "") + short(s.y[i]) + (options.unit || ""),
        }))
        .filter((row) => !row.value.startsWith("-") || row.value.length > 1 + (options.unit || "").length);
      return { title: `${options.title || "step"} ${x}`, items };
    };
  });
}

// Dashed vertical lines; only as many labels as there is room for.
function drawMarks(svg, marks, X, inner) {
  let free = inner.x0;
  for (const mark of marks) {
    const x = X(mark.x);
    svgEl("line", { x1: x, x2: x, y1: inner.y1, y2: inner.y0, stroke: "var(--faint)", "stroke-dasharray": "2 4" }, svg);
    if (x < free || x + 60 > inner.x1) continue;
    svgEl("text", { x: x + 3, y: inner.y1 + 8, class: "axis" }, svg).textContent = mark.label;
    free = x + 64;
  }
}

// The area between `low` and y; where only one step is known, a bar.
function drawBand(svg, s, X, Y) {
  const known = s.x.map((x, i) => [X(x), s.low[i], s.y[i]]).filter(([, low, high]) => finite(low) && finite(high));
  const wide = known.length === 1 ? [[known[0][0] - 5, ...known[0].slice(1)], [known[0][0] + 5, ...known[0].slice(1)]] : known;
  const up = wide.map(([x, , high]) => `${x.toFixed(1)} ${Y(high).toFixed(1)}`);
  const down = wide.map(([x, low]) => `${x.toFixed(1)} ${Y(low).toFixed(1)}`).reverse();
  svgEl("path", { d: `M${[...up, ...down].join("L")}Z`, fill: s.color, "fill-opacity": s.opacity || 0.2 }, svg);
}

function drawLine(svg, s, X, Y, options) {
  let path = "";
  let pen = "M";
  s.x.forEach((x, i) => {
    const ok = finite(s.y[i]) && (!options.log || s.y[i] > 0);
    if (ok) path += `${pen}${X(x).toFixed(1)} ${Y(s.y[i]).toFixed(1)}`;
    pen = ok ? "L" : "M";
  });
  const style = { d: path, fill: "none", stroke: s.color, "stroke-width": s.faint ? 1.2 : 2.2, "stroke-linejoin": "round" };
  svgEl("path", { ...style, opacity: s.faint ? 0.38 : 1, "stroke-dasharray": s.dash || "none" }, svg);
  const alone = (i) => !finite(s.y[i - 1]) && !finite(s.y[i + 1]); // no line goes through it
  s.x.forEach((x, i) => {
    if (finite(s.y[i]) && (s.dots || alone(i)))
      svgEl("circle", { cx: X(x), cy: Y(s.y[i]), r: 4, fill: "var(--panel)", stroke: s.color, "stroke-width": 2.2 }, svg);
  });
}

// series: [{name, color, y}] stacked over steps x; more steps than pixels allow are averaged in groups.
function stackedBars(host, x, series, options = {}) {
  series = series.filter((s) => s.y.some((v) => v > 0));
  if (!x.length || !series.length) return void htmlEl("div", "empty", host, "No data recorded");
  chart(host, options.height || 240, series, (svg, width, height) => {
    const group = Math.max(1, Math.ceil(x.length / ((width - PAD.left - PAD.right) / 3)));
    const count = Math.ceil(x.length / group);
    const mean = (s, i) => {
      const part = s.y.slice(i * group, (i + 1) * group);
      return part.reduce((a, b) => a + (b || 0), 0) / part.length;
    };
    const columns = Array.from({ length: count }, (_, i) => series.map((s) => mean(s, i)));
    const top = Math.max(...columns.map((c) => c.reduce((a, b) => a + b, 0)));
    const first = x[0] - 0.5;
    const last = x[x.length - 1] + 0.5;
    const { X, Y, inner } = axes(svg, width, height, [first, last], [0, top * 1.05], { whole: true });
    const slot = (inner.x1 - inner.x0) / count;
    columns.forEach((column, i) => {
      let base = 0;
      column.forEach((v, k) => {
        if (v > 0) {
          const y = Y(base + v);
          const box = { x: inner.x0 + i * slot + slot * 0.08, y, width: Math.min(slot * 0.84, 46), height: Math.max(Y(base) - y, 0) };
          box.x += (slot * 0.84 - box.width) / 2;
          svgEl("rect", { ...box, fill: series[k].color }, svg);
        }
        base += v;
      });
    });
    return (px) => {
      const i = Math.floor((px - inner.x0) / slot);
      if (i < 0 || i >= count) return null;
      const from = x[i * group];
      const to = x[Math.min((i + 1) * group, x.length) - 1];
      const rows = series.map((s, k) => ({ name: s.name, color: s.color, value: short(columns[i][k]) + (options.unit || "") }));
      return { title: from === to ? `step ${from}` : `steps ${from}-${to}, mean`, items: rows.reverse() };
    };
  });
}

// sets: [{name, color, counts}] over bins [edges[i], edges[i+1]); shown as shares of their own total.
function histogram(host, edges, sets, options = {}) {
  chart(host, options.height || 230, sets, (svg, width, height) => {
    const shares = sets.map((s) => s.counts.map((c) => (100 * c) / Math.max(s.counts.reduce((a, b) => a + b, 0), 1)));
    const top = Math.max(...shares.flat());
    const { X, Y, inner } = axes(svg, width, height, [edges[0], edges[edges.length - 1]], [0, top * 1.08], {});
    sets.forEach((s, k) => {
      let path = `M${X(edges[0])} ${inner.y0}`;
      shares[k].forEach((v, i) => (path += `L${X(edges[i])} ${Y(v)}L${X(edges[i + 1])} ${Y(v)}`));
      path += `L${X(edges[edges.length - 1])} ${inner.y0}Z`;
      svgEl("path", { d: path, fill: s.color, "fill-opacity": 0.22, stroke: s.color, "stroke-width": 1.6 }, svg);
    });
    return (px) => {
      const i = edges.findIndex((e, k) => k + 1 < edges.length && px >= X(e) && px < X(edges[k + 1]));
      if (i < 0) return null;
      const rows = sets.map((s, k) => ({ name: s.name, color: s.color, value: `${shares[k][i].toFixed(1)} %` }));
      return { title: `${short(edges[i])} to ${short(edges[i + 1])} tokens`, items: rows };
    };
  });
}
